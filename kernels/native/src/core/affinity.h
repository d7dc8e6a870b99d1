// Which cores threads may be bound to.
#pragma once

#include <vector>

namespace cardan_native {

// A core for each of `threads` threads, or none where binding them would do harm: where this process may not use every
// core of the machine, where there are not as many threads as cores, and where another process has bound its own, which
// then would share a core with these while others idle.
std::vector<int> pinnable_cores(int threads);

// Binds the calling thread; where the system refuses, the thread stays free.
void keep_to(int core);

}  // namespace cardan_native
