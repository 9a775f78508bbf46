// Blocks of a launch one after the other, or `resident` at once, and the function that Python calls.
#pragma once
#include "cuda.h"
#include "hopper.h"
#include "mma.h"

namespace shim {

// A kernel has one parameter, a struct.
template <typename Params>
void call(void (*kernel)(Params), const char* bytes) {
  Params params;
  memcpy(&params, bytes, sizeof params);
  kernel(params);
}
template <typename Params>
constexpr size_t params_bytes(void (*)(Params)) {
  return sizeof(Params);
}

const char* run(const Launch& given, size_t params_bytes, void (*body)(const char*));

}  // namespace shim

#define SHIM_KERNEL(...)                                                                                \
  extern "C" __attribute__((visibility("default"))) const char* shim_launch(const shim::Launch* given) { \
    return shim::run(*given, shim::params_bytes(&__VA_ARGS__),                                         \
                     [](const char* params) { shim::call(&__VA_ARGS__, params); });                    \
  }

// Addresses of KernelSizes, for Python.
#define SHIM_SIZES(...)                                                                    \
  extern "C" __attribute__((visibility("default"))) const int* shim_sizes(int index) {     \
    static const KernelSizes* const all[] = {__VA_ARGS__};                                 \
    return &all[index]->shared_bytes;                                                      \
  }
