// SPDX-License-Identifier: Apache-2.0
#include "stable.h"

#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <thread>

using torch::headeronly::ScalarType;

namespace stable {

uint32_t threads = 1;
bool beside = false;

std::map<std::string, Operator>& operators() {
  static std::map<std::string, Operator> all;
  return all;
}

size_t item_bytes(int32_t type) {
  switch (ScalarType(type)) {
  case ScalarType::Byte: return 1;
  case ScalarType::Half:
  case ScalarType::BFloat16: return 2;
  case ScalarType::Int:
  case ScalarType::Float: return 4;
  default: return 8;
  }
}

namespace {

const Tensor& of(AtenTensorHandle handle) {
  return *reinterpret_cast<const Tensor*>(handle);
}

int64_t numbers(const Tensor& t) {
  int64_t count = std::count(t.sizes.begin(), t.sizes.end(), 0) ? 0 : 1;
  for (const int64_t size : t.sizes) count *= count ? size : 0;
  return count;
}

// As torch has it: dimensions of one may have any stride, and nothing is contiguous, too.
bool contiguous(const Tensor& t) {
  if (numbers(t) == 0) return true;
  int64_t expected = 1;
  for (size_t i = t.sizes.size(); i-- > 0; expected *= t.sizes[i])
    if (t.sizes[i] != 1 && t.strides[i] != expected) return false;
  return true;
}

AOTITorchError nth(const std::vector<int64_t>& numbers, int64_t i, int64_t* out) {
  if (i < 0) i += int64_t(numbers.size());
  if (i < 0 || i >= int64_t(numbers.size())) return AOTI_TORCH_FAILURE;
  *out = numbers[i];
  return AOTI_TORCH_SUCCESS;
}

} // namespace
} // namespace stable

extern "C" {

// -- tensors --

AOTITorchError aoti_torch_get_dim(AtenTensorHandle t, int64_t* out) {
  *out = int64_t(stable::of(t).sizes.size());
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_numel(AtenTensorHandle t, int64_t* out) {
  *out = stable::numbers(stable::of(t));
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_size(AtenTensorHandle t, int64_t i, int64_t* out) {
  return stable::nth(stable::of(t).sizes, i, out);
}
AOTITorchError aoti_torch_get_stride(AtenTensorHandle t, int64_t i, int64_t* out) {
  return stable::nth(stable::of(t).strides, i, out);
}
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle t, bool* out) {
  *out = stable::contiguous(stable::of(t));
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle t, int32_t* out) {
  *out = stable::of(t).type;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle t, void** out) {
  *out = stable::of(t).data;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle t, const void** out) {
  *out = stable::of(t).data;
  return AOTI_TORCH_SUCCESS;
}
// Whoever made the tensor frees it.
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle) {
  return AOTI_TORCH_SUCCESS;
}

size_t aoti_torch_dtype_element_size(int32_t type) {
  return stable::item_bytes(type);
}
#define TYPE(name, type)                                                                           \
  int32_t aoti_torch_dtype_##name() {                                                              \
    return int32_t(ScalarType::type);                                                              \
  }
TYPE(bfloat16, BFloat16)
TYPE(bool, Bool)
TYPE(complex128, ComplexDouble)
TYPE(complex32, ComplexHalf)
TYPE(complex64, ComplexFloat)
TYPE(float16, Half)
TYPE(float32, Float)
TYPE(float64, Double)
TYPE(float8_e4m3fn, Float8_e4m3fn)
TYPE(float8_e4m3fnuz, Float8_e4m3fnuz)
TYPE(float8_e5m2, Float8_e5m2)
TYPE(float8_e5m2fnuz, Float8_e5m2fnuz)
TYPE(int16, Short)
TYPE(int32, Int)
TYPE(int64, Long)
TYPE(int8, Char)
TYPE(uint16, UInt16)
TYPE(uint32, UInt32)
TYPE(uint64, UInt64)
TYPE(uint8, Byte)
#undef TYPE

// -- strings --

AOTITorchError torch_new_string_handle(const char* from, size_t length, StringHandle* out) {
  *out = reinterpret_cast<StringHandle>(new std::string(from, length));
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_delete_string(StringHandle s) {
  delete reinterpret_cast<std::string*>(s);
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_string_length(StringHandle s, size_t* out) {
  *out = reinterpret_cast<std::string*>(s)->size();
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_string_c_str(StringHandle s, const char** out) {
  *out = reinterpret_cast<std::string*>(s)->c_str();
  return AOTI_TORCH_SUCCESS;
}

// -- threads --

AOTITorchError torch_get_num_threads(uint32_t* out) {
  *out = stable::threads;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t, ParallelFunc f, void* with) {
  std::vector<std::thread> others;
  for (int64_t i = begin; i < end; ++i)
    if (stable::beside)
      others.emplace_back(f, i, i + 1, with);
    else
      f(i, i + 1, with);
  for (std::thread& other : others) other.join();
  return AOTI_TORCH_SUCCESS;
}

// -- operators --

uint64_t aoti_torch_abi_version() {
  return TORCH_TARGET_VERSION;
}
AOTITorchError aoti_torch_library_init_def(const char*, const char*, uint32_t,
                                           TorchLibraryHandle* out) {
  *out = nullptr;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                            TorchLibraryHandle* out) {
  *out = nullptr;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_library_init_fragment(const char*, const char*, uint32_t,
                                                TorchLibraryHandle* out) {
  *out = nullptr;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) {
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char*) {
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError torch_library_impl(TorchLibraryHandle, const char* name, stable::Operator f,
                                  uint64_t) {
  stable::operators()[name] = f;
  return AOTI_TORCH_SUCCESS;
}

// -- Python, which would load the operators, and does not here --

void* PyExc_ValueError = nullptr;
void* PyErr_Format(void*, const char*, ...) {
  return nullptr;
}
void* PyModule_Create2(void*, int) {
  return nullptr;
}
}
