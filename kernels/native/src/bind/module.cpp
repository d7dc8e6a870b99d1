#include "bind/bind.h"

NB_MODULE(CARDAN_MODULE, module) {
  module.attr("VARIANT") = CARDAN_VARIANT;
  cardan_native::bind_core(module);
  cardan_native::bind_layers(module);
  cardan_native::bind_linear(module);
  cardan_native::bind_attention(module);
  cardan_native::bind_sampling(module);
}
