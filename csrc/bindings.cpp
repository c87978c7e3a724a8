// bindings.cpp: the torch ops, on torch's stable ABI (no ATen headers: this file compiles in about a second).
//
// Built twice: the CPU library defines every schema and implements `copy` for the CPU; the CUDA library, compiled with
// KVNB_CUDA, adds the CUDA implementations. A wrong argument raises ValueError (std::invalid_argument) that names the
// argument, what it was and what it must be, before anything is written.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "launch.h"

namespace {

using kvnb::Problem;
using kvnb::Rows;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::string describe(const Tensor& t) {
  if (!t.defined()) return "None";
  std::ostringstream text;
  text << torch::headeronly::toString(t.scalar_type()) << " [";
  for (int64_t i = 0; i < t.dim(); ++i) text << (i ? ", " : "") << t.size(i);
  text << "] with strides [";
  for (int64_t i = 0; i < t.dim(); ++i) text << (i ? ", " : "") << t.stride(i);
  text << "] on " << (t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : t.is_cpu() ? "cpu" : "another device");
  return text.str();
}

[[noreturn]] void refuse(const char* name, const Tensor& t, const std::string& must) {
  throw std::invalid_argument(std::string(name) + " is " + describe(t) + ", must " + must);
}

std::string shape(std::initializer_list<int64_t> sizes) {
  std::ostringstream text;
  const char* comma = "[";
  for (int64_t size : sizes) text << std::exchange(comma, ", ") << size;
  return text.str() + "]";
}

void check_kind(const char* name, const Tensor& t, const Tensor& key, int64_t rank, const char* axes) {
  if (!t.defined()) refuse(name, t, "be a tensor");
  if (t.dim() != rank) refuse(name, t, std::string("have ") + std::to_string(rank) + " dimensions, " + axes);
  if (t.is_cuda() != key.is_cuda() || t.is_cpu() != key.is_cpu() || t.get_device_index() != key.get_device_index())
    refuse(name, t, "be on key's device");
  if (t.scalar_type() != key.scalar_type())
    refuse(name, t, std::string("have key's dtype, ") + torch::headeronly::toString(key.scalar_type()));
  if (t.size(rank - 1) > 1 && t.stride(rank - 1) != 1) refuse(name, t, "have stride 1 in its last dimension");
}

// Whether elements of a tensor share memory: from the smallest stride up, each must step over all that smaller ones span.
// (Axes that interleave without touching, as no cache's do, count as sharing.)
bool overlaps_itself(const Tensor& t) {
  std::array<std::pair<int64_t, int64_t>, 4> axes;  // stride and size, of a cache's four at most
  size_t count = 0;
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.size(i) > 1) axes[count++] = {t.stride(i), t.size(i)};
  std::sort(axes.begin(), axes.begin() + count);
  int64_t span = 1;
  for (size_t i = 0; i < count; ++i) {
    const auto [stride, size] = axes[i];
    if (stride < span) return true;
    span += stride * (size - 1);
  }
  return false;
}

void check_cache(const char* name, const Tensor& cache, const Tensor& source, const Tensor& key) {
  check_kind(name, cache, key, 4, "[num_blocks, block_size, num_kv_heads, head_size]");
  if (cache.size(2) != source.size(1) || cache.size(3) != source.size(2))
    refuse(name, cache, "end in [num_kv_heads, head_size] = " + shape({source.size(1), source.size(2)}));
  if (cache.numel() > 0 && overlaps_itself(cache))
    refuse(name, cache, "not be expanded or overlap itself: its rows share memory");
}

Rows rows_of(const Tensor& source, const Tensor& cache) {
  const int64_t itemsize = static_cast<int64_t>(source.element_size());
  // a stride along a dimension of size 1 is never used: 0 keeps it out of the alignment
  auto bytes = [&](const Tensor& t, int64_t i) { return t.size(i) > 1 ? t.stride(i) * itemsize : 0; };
  Rows rows = {};
  rows.source = static_cast<const char*>(source.const_data_ptr());
  rows.source_token_stride = bytes(source, 0);
  rows.source_head_stride = bytes(source, 1);
  rows.cache = static_cast<char*>(cache.mutable_data_ptr());
  rows.block_stride = bytes(cache, 0);
  rows.slot_stride = bytes(cache, 1);
  rows.head_stride = bytes(cache, 2);
  rows.head_bytes = source.size(2) * itemsize;
  return rows;
}

// Whether the caches, none of them overlapping itself, have no byte in common. They may lie apart as a whole, or take
// turns in frames: rows [K | V] of each head, pages [K's rows | V's rows] of each block. Where one frame begins after
// another, both caches must have the same stride; within one frame, all of K's bytes come before V's or the reverse.
// (Caches that interleave without touching in any other way count as sharing.)
bool lie_apart(const Rows& key, const Rows& value, int64_t num_blocks, int64_t block_size, int64_t num_heads) {
  const bool key_is_first = key.cache <= value.cache;
  const Rows &first = key_is_first ? key : value, &second = key_is_first ? value : key;
  const int64_t between = second.cache - first.cache;
  struct Axis { int64_t first, second, size; };  // strides
  std::array<Axis, 3> axes = {{{first.block_stride, second.block_stride, num_blocks},
                               {first.slot_stride, second.slot_stride, block_size},
                               {first.head_stride, second.head_stride, num_heads}}};
  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.first < b.first; });
  int64_t first_span = first.head_bytes, span = between + second.head_bytes;  // of a frame: of its first cache, of both
  for (const Axis& axis : axes) {
    if (axis.first < between) {  // steps within a frame
      first_span += axis.first * (axis.size - 1);
    } else if (axis.first != axis.second || axis.first < span) {
      return false;
    }
    span += axis.second * (axis.size - 1);
  }
  return first_span <= between;
}

// The bytes of a tensor from its first element to its last.
struct Range {
  const char* begin;
  int64_t size;
};

bool meet(const Range& a, const Range& b) {
  return a.size > 0 && b.size > 0 && a.begin < b.begin + b.size && b.begin < a.begin + a.size;
}

// What a call writes shares no byte with anything else: else what it leaves would depend on the order of its rows.
void check_memory(const Problem& problem, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                  const Tensor& value_cache, const Tensor& slot_mapping) {
  if (problem.num_slots == 0 || problem.num_heads == 0) return;
  const int64_t tokens = problem.num_tokens, blocks = key_cache.size(0), size = problem.block_size;
  const int64_t heads = problem.num_heads;
  const Rows &keys = problem.key, &values = problem.value;
  if (keys.head_bytes > 0 && values.head_bytes > 0 && !lie_apart(keys, values, blocks, size, heads)) {
    const int64_t behind = values.cache - keys.cache;
    refuse("value_cache", value_cache,
           "share no memory with key_cache, which begins " + std::to_string(std::abs(behind)) + " bytes " +
               (behind < 0 ? "later" : "earlier") + ": lie apart from it, or take turns with it at equal strides");
  }

  auto read = [&](const Rows& rows) -> Range {
    const int64_t steps = (tokens - 1) * rows.source_token_stride + (heads - 1) * rows.source_head_stride;
    return {rows.source, tokens && rows.head_bytes ? steps + rows.head_bytes : 0};
  };
  auto written = [&](const Rows& rows) -> Range {
    const int64_t steps = (blocks - 1) * rows.block_stride + (size - 1) * rows.slot_stride;
    return {rows.cache, rows.head_bytes ? steps + (heads - 1) * rows.head_stride + rows.head_bytes : 0};
  };
  const Range key_rows = written(keys), value_rows = written(values);
  auto check = [&](const char* name, const Tensor& t, const Range& range) {
    if (meet(range, key_rows)) refuse(name, t, "lie apart from key_cache, which is written");
    if (meet(range, value_rows)) refuse(name, t, "lie apart from value_cache, which is written");
  };
  check("key", key, read(keys));
  check("value", value, read(values));
  check("slot_mapping", slot_mapping,
        {static_cast<const char*>(problem.slots), tokens * (problem.slots_are_64bit ? 8 : 4)});
}

Problem checked(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                const Tensor& slot_mapping) {
  check_kind("key", key, key, 3, "[num_tokens, num_kv_heads, head_size]");
  const int64_t itemsize = static_cast<int64_t>(key.element_size());
  if (itemsize != 1 && itemsize != 2 && itemsize != 4 && itemsize != 8)
    refuse("key", key, "have elements of 1, 2, 4 or 8 bytes");
  check_kind("value", value, key, 3, "[num_tokens, num_kv_heads, value_head_size]");
  if (value.size(0) != key.size(0) || value.size(1) != key.size(1))
    refuse("value", value, "begin with key's [num_tokens, num_kv_heads] = " + shape({key.size(0), key.size(1)}));
  check_cache("key_cache", key_cache, key, key);
  check_cache("value_cache", value_cache, value, key);
  if (value_cache.size(0) != key_cache.size(0) || value_cache.size(1) != key_cache.size(1))
    refuse("value_cache", value_cache,
           "begin with key_cache's [num_blocks, block_size] = " + shape({key_cache.size(0), key_cache.size(1)}));
  if (!slot_mapping.defined()) refuse("slot_mapping", slot_mapping, "be a tensor");
  const ScalarType index = slot_mapping.scalar_type();
  if (index != ScalarType::Long && index != ScalarType::Int) refuse("slot_mapping", slot_mapping, "be int64 or int32");
  if (slot_mapping.dim() != 1 || slot_mapping.size(0) > key.size(0))
    refuse("slot_mapping", slot_mapping, "be [n] with n at most num_tokens = " + std::to_string(key.size(0)));
  if (slot_mapping.size(0) > 1 && slot_mapping.stride(0) != 1) refuse("slot_mapping", slot_mapping, "be contiguous");
  if (slot_mapping.is_cuda() != key.is_cuda() || slot_mapping.get_device_index() != key.get_device_index())
    refuse("slot_mapping", slot_mapping, "be on key's device");

  Problem problem = {};
  problem.key = rows_of(key, key_cache);
  problem.value = rows_of(value, value_cache);
  problem.slots = slot_mapping.const_data_ptr();
  problem.slots_are_64bit = index == ScalarType::Long;
  problem.num_tokens = slot_mapping.size(0);
  problem.num_heads = key.size(1);
  problem.block_size = key_cache.size(1);
  problem.num_slots = key_cache.size(0) * key_cache.size(1);
  problem.itemsize = itemsize;
  check_memory(problem, key, value, key_cache, value_cache, slot_mapping);
  return problem;
}

bool is_empty(const Problem& problem) {
  return problem.num_tokens == 0 || problem.num_heads == 0 || problem.num_slots == 0 ||
         (problem.key.head_bytes == 0 && problem.value.head_bytes == 0);
}

#ifndef KVNB_CUDA

constexpr int64_t kBytesPerThread = 128 * 1024;  // below this a second thread costs more than it saves

void copy_cpu(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache, const Tensor slot_mapping) {
  const Problem problem = checked(key, value, key_cache, value_cache, slot_mapping);
  if (is_empty(problem)) return;
  const int64_t token_bytes = problem.num_heads * (problem.key.head_bytes + problem.value.head_bytes);
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / token_bytes);
  if (problem.num_tokens <= grain) return kvnb_copy_cpu(&problem, 0, problem.num_tokens);
  torch::stable::parallel_for(0, problem.num_tokens, grain,
                              [&](int64_t begin, int64_t end) { kvnb_copy_cpu(&problem, begin, end); });
}

#else

// torch's current stream on the tensors' device, which is made current while this lives.
struct Place {
  torch::stable::accelerator::DeviceGuard guard;
  void* stream = nullptr;
  explicit Place(const Tensor& t) : guard(t.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream) == 0, "no current CUDA stream");
  }
};

void succeed(int error) {
  if (error != 0) throw std::runtime_error(std::string("kvnb kernel launch failed: ") + kvnb_error_string(error));
}

void copy_with(bool dependent, const Tensor& key, const Tensor& value, const Tensor& key_cache,
               const Tensor& value_cache, const Tensor& slot_mapping) {
  const Problem problem = checked(key, value, key_cache, value_cache, slot_mapping);
  if (is_empty(problem)) return;
  Place place(key);
  succeed(kvnb_copy_cuda(&problem, dependent, place.stream));
}

void copy_cuda(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache, const Tensor slot_mapping) {
  copy_with(false, key, value, key_cache, value_cache, slot_mapping);
}

void copy_dependent_cuda(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache,
                         const Tensor slot_mapping) {
  copy_with(true, key, value, key_cache, value_cache, slot_mapping);
}

void vllm_scalar_cuda(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache,
                      const Tensor slot_mapping) {
  const Problem problem = checked(key, value, key_cache, value_cache, slot_mapping);
  if (is_empty(problem)) return;
  Place place(key);
  succeed(kvnb_vllm_scalar_cuda(&problem, place.stream));
}

void empty_cuda(const Tensor anywhere, bool dependent) {
  Place place(anywhere);
  succeed(kvnb_empty_cuda(dependent, place.stream));
}

char* bytes_of(const char* name, const Tensor& t) {
  char* data = static_cast<char*>(t.mutable_data_ptr());
  const int64_t bytes = t.numel() * static_cast<int64_t>(t.element_size());
  if (!t.is_contiguous() || (reinterpret_cast<uintptr_t>(data) | bytes) % 16)
    refuse(name, t, "be contiguous, 16-byte aligned and a multiple of 16 bytes long");
  return data;
}

void contiguous_copy_cuda(Tensor key_to, const Tensor key_from, Tensor value_to, const Tensor value_from) {
  const int64_t key_bytes = key_from.numel() * static_cast<int64_t>(key_from.element_size());
  const int64_t value_bytes = value_from.numel() * static_cast<int64_t>(value_from.element_size());
  if (key_to.numel() != key_from.numel()) refuse("key_to", key_to, "be as long as key_from");
  if (value_to.numel() != value_from.numel()) refuse("value_to", value_to, "be as long as value_from");
  Place place(key_to);
  succeed(kvnb_contiguous_copy_cuda(bytes_of("key_to", key_to), bytes_of("key_from", key_from), key_bytes,
                                    bytes_of("value_to", value_to), bytes_of("value_from", value_from), value_bytes,
                                    place.stream));
}

void flush_cuda(const Tensor buffer, Tensor sink) {
  Place place(buffer);
  succeed(kvnb_flush_cuda(bytes_of("buffer", buffer), buffer.numel() * static_cast<int64_t>(buffer.element_size()),
                          sink.mutable_data_ptr(), place.stream));
}

void clock_probe_cuda(Tensor out, int64_t nanoseconds) {
  if (out.scalar_type() != ScalarType::Long || out.numel() != 2 || !out.is_contiguous())
    refuse("out", out, "be a contiguous int64 tensor of 2 elements");
  Place place(out);
  succeed(kvnb_clock_probe_cuda(nanoseconds, static_cast<int64_t*>(out.mutable_data_ptr()), place.stream));
}

#endif

}  // namespace

#ifndef KVNB_CUDA

#define KVNB_COPY_SCHEMA \
  "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()"

STABLE_TORCH_LIBRARY(kvnb, m) {
  m.def("copy" KVNB_COPY_SCHEMA);
  m.def("copy_dependent" KVNB_COPY_SCHEMA);
  m.def("vllm_scalar" KVNB_COPY_SCHEMA);
  m.def("empty(Tensor anywhere, bool dependent) -> ()");
  m.def("contiguous_copy(Tensor(a!) key_to, Tensor key_from, Tensor(b!) value_to, Tensor value_from) -> ()");
  m.def("flush(Tensor buffer, Tensor(a!) sink) -> ()");
  m.def("clock_probe(Tensor(a!) out, int nanoseconds) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kvnb, CPU, m) { m.impl("copy", TORCH_BOX(&copy_cpu)); }

#else

STABLE_TORCH_LIBRARY_IMPL(kvnb, CUDA, m) {
  m.impl("copy", TORCH_BOX(&copy_cuda));
  m.impl("copy_dependent", TORCH_BOX(&copy_dependent_cuda));
  m.impl("vllm_scalar", TORCH_BOX(&vllm_scalar_cuda));
  m.impl("empty", TORCH_BOX(&empty_cuda));
  m.impl("contiguous_copy", TORCH_BOX(&contiguous_copy_cuda));
  m.impl("flush", TORCH_BOX(&flush_cuda));
  m.impl("clock_probe", TORCH_BOX(&clock_probe_cuda));
}

#endif
