// Prints which variants can run here, for a build of only these.

#include <cstdio>

#include "isa.h"

int main() {
  for (const std::string& name : cardan_native::runnable_variants()) std::printf("%s;", name.c_str());
}
