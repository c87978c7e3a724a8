// kv_index_probe.cpp: csrc/kv_index.h behind C functions, for test_kv_index.py to call on the CPU.
#include "kv_index.h"

extern "C" {

void probe_quotients(uint32_t divisor, const uint32_t* dividends, uint32_t* quotients, int64_t count) {
  const kvnb::Divisor by(divisor);
  for (int64_t i = 0; i < count; ++i) quotients[i] = by.quotient(dividends[i]);
}

// Bytes from the cache's beginning to a row, and from the source's: no memory is touched.
int64_t probe_cache_row(int64_t block, int64_t offset, int64_t head, int64_t block_stride, int64_t slot_stride,
                        int64_t head_stride) {
  kvnb::Rows rows = {};
  rows.block_stride = block_stride;
  rows.slot_stride = slot_stride;
  rows.head_stride = head_stride;
  return reinterpret_cast<intptr_t>(kvnb::cache_row(rows, block, offset, head));
}

int64_t probe_source_row(int64_t token, int64_t head, int64_t token_stride, int64_t head_stride) {
  kvnb::Rows rows = {};
  rows.source_token_stride = token_stride;
  rows.source_head_stride = head_stride;
  return reinterpret_cast<intptr_t>(kvnb::source_row(rows, token, head));
}

bool probe_is_written(int64_t slot, int64_t num_slots) { return kvnb::is_written(slot, num_slots); }
}
