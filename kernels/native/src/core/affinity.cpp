#include "core/affinity.h"

#if defined(__linux__)
#include <sched.h>
#include <sys/socket.h>
#include <sys/sysinfo.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#endif

namespace cardan_native {

#if defined(__linux__)

namespace {

// Whether this process is the one that binds threads. A name in the abstract space belongs to one socket at a time and
// goes with its process, however that ends; only the name is used, nobody connects.
bool may_bind() {
  static const bool first = [] {
    constexpr char kName[] = "\0cardan-compute-cores";
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, kName, sizeof kName - 1);
    const int held = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (held < 0) return false;
    const socklen_t size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + sizeof kName - 1);
    if (bind(held, reinterpret_cast<const sockaddr*>(&address), size) == 0) return true;
    close(held);
    return false;
  }();
  return first;
}

}  // namespace

std::vector<int> pinnable_cores(int threads) {
  cpu_set_t allowed;
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return {};
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  if (threads != static_cast<int>(cores.size()) || threads < get_nprocs() || threads < 2 || !may_bind()) return {};
  return cores;
}

void keep_to(int core) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  sched_setaffinity(0, sizeof only, &only);
}

#else

std::vector<int> pinnable_cores(int) { return {}; }
void keep_to(int) {}

#endif

}  // namespace cardan_native
