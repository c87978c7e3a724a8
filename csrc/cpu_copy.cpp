// cpu_copy.cpp: the copy on the CPU, a run of tokens at a time; bindings.cpp spreads runs over torch's threads.
//
// Rows whose heads lie one behind the other in source and cache are moved by one memcpy, others head by head.
#include <cstring>

#include "launch.h"

namespace {

void copy_token(const kvnb::Rows& rows, int64_t token, int64_t block, int64_t offset, int64_t num_heads) {
  if (rows.source_head_stride == rows.head_bytes && rows.head_stride == rows.head_bytes) {
    std::memcpy(kvnb::cache_row(rows, block, offset, 0), kvnb::source_row(rows, token, 0), num_heads * rows.head_bytes);
    return;
  }
  for (int64_t head = 0; head < num_heads; ++head)
    std::memcpy(kvnb::cache_row(rows, block, offset, head), kvnb::source_row(rows, token, head), rows.head_bytes);
}

}  // namespace

extern "C" void kvnb_copy_cpu(const kvnb::Problem* problem, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = kvnb::slot_of(*problem, token);
    if (!kvnb::is_written(slot, problem->num_slots)) continue;
    const int64_t block = slot / problem->block_size;
    const int64_t offset = slot % problem->block_size;
    copy_token(problem->key, token, block, offset, problem->num_heads);
    copy_token(problem->value, token, block, offset, problem->num_heads);
  }
}
