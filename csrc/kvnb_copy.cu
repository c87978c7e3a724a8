// kvnb_copy.cu: write new K and V rows into a paged cache, both in one launch.
//
// How it works. The work is a flat list of (token, head, vector) triples; a thread owns one vector of K and the same
// vector of V. The source does not depend on the slot, so the slot and both vectors are loaded at once and only the
// stores wait for the slot: one memory latency instead of two. The address is block * block_stride + offset *
// slot_stride + head * head_stride, so NHD, HND and packed caches run the same code.
//
// What varies:
//   pair_kernel      16-byte vectors, K and V heads of one size, with equal strides and at most 32 GiB apart, fewer than
//                    2^31 slots. CompactPlan: rows, heads and blocks of powers of two; ApartPlan: and the source's heads
//                    apart; DividedPlan: of any size, the source's heads in a row
//   fast_kernel      as the last, K and V wherever they lie, one pair of vectors per thread; or two or four, where the copy
//                    is more than the GPU holds threads and L2 holds it easily
//   general_kernel   everything else, at 16, 8, 4, 2 or 1 bytes, as pointers, strides and rows allow
//   dependent        programmatic dependent launch: the next kernel's launch overlaps this one; nothing is read before
//                    griddepcontrol.wait, since a producer earlier in the stream may still be writing key, value or slots.
//                    The next kernel is let in first thing, or late, after that wait: see launch_of
//
// What small copies are made of. A decode step's copy is a launch, a fetch of constants, one memory latency and the
// stores, so the tuned kernels are arranged around the instructions before their loads: no branch, and every parameter that
// the loads need in one 64-byte line of constants. The usual shapes are CompactPlan's: shifts instead of divisions,
// everything in one line. Other sizes need a second line; ptxas hoists some of it above the loads, which wait for it (in the
// fast kernel), unless it is kept from that: see behind(). In the pair kernel nothing is bounded where pairs fill the last
// block. And that one latency should be L2's: the slots are read again by every layer of a step, with more than L2 holds in
// between, so they are loaded to stay there, but for some copies of about a wave of threads: see slots_stay().
//
// Roads not taken, each tried on an H200 in CUDA graphs, inputs just produced; times for 8 heads x 128 bf16 NHD unless
// said, first the road's, then this file's at that time (it has become faster since):
//   slots loaded as rows are (DRAM's latency) 128 tokens 1.91 us, 1.63; 1 head, 1,024 tokens 2.01 us, 1.61; 2,048 tokens
//                                             3.86 us, 3.76. Short rows and other sizes, below, differ
//   slots to stay in L2, four pairs a thread  4,096 tokens 7.3 us, 7.1
//   two pairs of vectors per thread           slower at up to 2,048 tokens and from 8,192; 4,096 tokens 7.9 us, 7.1
//   four pairs where the copy is larger than  4,608 tokens 10.2 us, 9.9; 16,384 tokens 36.4 us, 36.3; 1 head, 36,864
//   33 MB, with an L2 of 60                   tokens 10.8 us, 10.4
//   blocks of 256 threads, launched plainly   with the bound below: 8 tokens 1.16 us, 1.11; 2,048 tokens 3.88 us, 3.84; faster
//                                             around 128 tokens only, 1.57 us, 1.61
//   blocks of 128, launched dependently       1,024 tokens 2.08 us, 1.89; equal up to 16 tokens
//   blocks of 64 and 512 threads              slower or equal
//   the fast kernel for CompactPlan's shapes, 8 tokens 1.15 us, 1.08; 256 tokens 1.77 us, 1.73; launched dependently 1.17,
//   with shifts                               1.13
//   a bound on pairs that fill the blocks     8 tokens 1.11 us, 1.08; 2,048 tokens 3.84 us, 3.79
//   K and V in threads of their own           in one grid or K's blocks before V's: slower nearly everywhere, 65,536 tokens
//                                             142 us and more, 136
//   ld.global.cg                              2,048 tokens 4.1 us, 3.9; 128 heads x 128, 32 tokens 2.5 us, 2.1
//   ld.global.L1::no_allocate, ld.global.nc   2,048 tokens 5.9 and 6.3 us, 3.9; no difference where the sources are cold
//   rows by ld.global.L1::evict_first, slots  2,048 tokens 5.8 us, 3.8, and 3.95 us, 3.8
//   by L1::evict_last
//   V loaded once K is stored                 2,048 tokens 4.2 us, 3.8; no difference beyond L2
//   prefetch of 128 or 256 bytes              slower or equal
//   st.global.cs, st.global.L1::no_allocate   faster in a chain of writes, 4,096 tokens 6.7 us, 7.2; slower when the rows
//                                             are read back after each write, as attention does, 20.6 us, 19.2
//   a branch on the slot, stores behind it    ptxas sinks the loads behind it too: 1 token 1.20 us, 1.09
//   the token from blockIdx.x, a block a row  as fast as shifts, and only where a row fills whole blocks
//   launch_dependents after the loads         where most put it. ptxas sinks it behind the wait for the slot: 1 token
//                                             0.77 us, 0.65. Kept from sinking, it is as fast as first, and 8 % faster
//                                             at 2,048 tokens, but nothing keeps it there in every compiler
//   launch_dependents first at every size     the same copy again and again, all of it in L2: 256 tokens 2.0 us, 1.0; late
//                                             costs 1.16 us, 1.12 with inputs just produced, 640 tokens 1.58 us, 1.44
//   launch_dependents first from 3/5 to       1,536 tokens 3.04 us, 2.67; the same copy again and again 2.38 us, 2.53; 1
//   17/20 of a wave                           head, 10,240 tokens 2.87 us, 2.45
//   launch_dependents late at every size      1,024 tokens 1.98 us, 1.88; 2,048 tokens 3.34 us, 3.20
//   dependent, four pairs from one wave on    2,304 tokens 5.8 us, 4.0; from one and a half: 3,072 tokens 5.6 us, 5.0
//   plain, four pairs from 15/16 of a wave    2,048 tokens 3.96 us, 3.77
//   the general kernel for heads apart        256 tokens of [heads, tokens, head size] 2.29 us, 1.73; 2.30 with 32-bit
//                                             divisions, 2.02 with slots to stay in L2
//
// Roads for rows of other sizes, 8 heads x 80 and NHD unless said, times as above. Here too a prediction was written down
// before each ran, and held where nothing else is said:
//   the fast kernel                           32 tokens 1.27 us, 1.22; 256 tokens 1.63 us, 1.59; x 96, packed, 8 tokens
//                                             1.17 us, 1.09
//   the second line not kept behind a load    32 tokens 1.27 us, 1.22; predicted: 1.24
//   a row as one, without heads and blocks,   32 tokens 1.23 us, 1.22; it serves NHD alone
//   in one line of constants
//   the fast kernel with its second line      predicted: as fast as this file. 32 tokens 1.26 us, 1.22; 12 heads x 128,
//   kept behind a load                        1,280 tokens 4.2 us, 3.6, since it takes more than 32 registers
//   four pairs a thread with the second line  predicted: no difference. 4,096 tokens 5.0 us, 4.8
//   kept behind a load
//   slots to stay in L2, of more than 4/5 of  predicted: slower. 3,072 tokens 3.8 us, 3.6; 3 heads x 128, 5,632 tokens 4.1 us,
//   a wave                                    3.8; blocks of 1,600 slots, 8 heads x 128, 2,048 tokens 4.0 us, 3.8; launched
//                                             dependently 3.2 us, 3.0, and 3.5 us, 3.3
//   slots loaded as rows are, of less         predicted: faster. 1,536 tokens 2.63 us, 2.53; 2,560 tokens 3.30 us, 3.26;
//                                             launched dependently 2.0 us, 1.85, and 2.9 us, 3.0: that one is taken
//   the slot loaded behind its rows           predicted: no difference. 2,048 tokens 2.93 us, 2.92
//   blocks of 160 threads, two tokens each    predicted: no difference. 2,048 tokens 2.94 us, 2.92; 12 heads x 128, 1,400
//                                             tokens 4.3 us, 4.0
//   two or four pairs a thread from 1/2 wave  predicted: slower. 2,048 tokens 3.0 and 3.1 us, 2.9
//
// Roads for many short rows, 1 head x 128 and NHD unless said, times as above, a prediction written down before each ran:
//   slots to stay in L2, of many tokens too   predicted for 16,384 tokens: faster, by 0.15 us. 4.05 us, 3.82; 36,864 tokens
//                                             10.3 us, 9.5; x 64, 32,768 tokens 4.7 us, 4.3; launched dependently, 16,384
//                                             tokens 3.6 us, 3.1
//   four pairs a thread                       predicted for 16,384 tokens: 3.9 us. 4.3 us, 3.8; 20,480 tokens 5.1 us, 4.6;
//                                             launched dependently, 24,576 tokens 7.2 us, 4.8
//   two pairs up to one wave                  predicted for 16,384 tokens: 4.0 us. 3.92 us, 3.82
//   two pairs beyond one and a half waves     predicted for 28,672 tokens: 6.2 us. 7.6 us, 7.1
//   two pairs in 32 registers, all resident   predicted for 28,672 tokens: 6.9 us. 7.4 us, 7.1; 20,480 tokens 5.4 us, 4.6
//   up to two waves
//   blocks of 64, 256 and 512 threads         predicted for 16,384 tokens: 4.3, 4.05 and 4.0 us. 4.03, 4.08 and 4.10 us, with
//                                             slots to stay 4.05
// Around a wave of threads, torch.compile is up to 3 % faster still: 2 heads, 8,448 tokens 3.75 us, 3.88.
//
// Roads for copies beyond L2. At 8 heads x 128 this file takes 36.1 us for 16,384 tokens, where limit.copy takes 33.9, and
// 136.1 us for 65,536, where it takes 127.8: 93 to 94 %. Before these roads ran, not before the first ones above, a
// prediction was written down:
//   bulk copies (cp.async.bulk) in and out,   predicted: 0.4 us slower at 1 token, within 1 % from 16,384 on, as what is lost
//   1 to 8 KB each, one to four warps         is lost in DRAM. So it is: 1 token 1.38 us, 1.06; 1,024 tokens 2.91 us, 2.56;
//                                             16,384 tokens 36.2 us, 36.0; 128 heads, 4,096 tokens 136.2 us, 135.7
//   bulk copies out of shared memory only     predicted: as before. 1 token 1.40 us, 1.06; 16,384 tokens 36.2 us, 36.0; 128
//                                             heads, 4,096 tokens 135.4 us, 135.7
//   stores that leave L2 first (st.global.cs  predicted: 1 % faster, as DRAM would get a row's lines together. They are 0.3
//   or evict_first)                           to 0.9 % slower: 65,536 tokens 136.5 us, 136.1
//   stores that leave L2 last                 predicted: slower. 65,536 tokens 137.2 us, 136.1
//   sources that leave L2 first               predicted: no difference. 16,384 tokens 37.0 us, 36.1
//   vectors of 8 or 4 bytes                   predicted: no difference, and 1 % faster. 16,384 tokens 36.6 and 51 us, 36.4; 2
//                                             heads, 65,536 tokens 36.6 and 51 us, 36.2, where torch.compile takes 35.8
//   half the threads on a multiprocessor      predicted: 1 % slower. 16,384 tokens 36.2 us, 36.1; 65,536 tokens 139.1 us,
//                                             136.1, and 157 us with a quarter of them
// What is lost is that blocks are scattered. In slot order, all rows in one long block, 65,536 tokens take 128.7 us; whole
// blocks of 16 slots, in random order, take as long as single random rows.
//
// Origin: own design; K and V in one launch is also SGLang's (sgl-project/sglang#16273), which loads the slot first.
#include <cuda_runtime.h>

#include <cstddef>
#include <initializer_list>
#include <optional>
#include <type_traits>

#include "capacity.h"
#include "launch.h"

namespace {

using kvnb::Capacity;
using kvnb::Divisor;
using kvnb::Problem;
using kvnb::Rows;

// Plainly, or dependently: then the next kernel may launch as this one begins, or once this one's own wait is over.
enum class Launch { kPlain, kDependent, kDependentLate };

constexpr int kThreads = 256;  // of a block of the general kernel; of a tuned one,
template <int kPairs, Launch kLaunch>
constexpr int kBlock = kPairs == 1 && kLaunch != Launch::kPlain ? 256 : 128;
constexpr int64_t kMostPairsPerLaunch = (int64_t{1} << 31) - 1 - kThreads;

// Loads are asm volatile so that none moves above griddepcontrol.wait. Stores are predicated rather than branched around:
// behind a branch on the slot, ptxas moves the loads that must be in flight with the slot's own to where they are used.
#define KVNB_ACCESS(type, ptx, reg, held)                                                                          \
  __device__ __forceinline__ type load(const type* from) {                                                         \
    held value;                                                                                                    \
    asm volatile("ld.global." ptx " %0, [%1];" : "=" reg(value) : "l"(from));                                      \
    return static_cast<type>(value);                                                                               \
  }                                                                                                                \
  __device__ __forceinline__ void store_if(bool condition, type* to, type value) {                                 \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global." ptx " [%1], %2;}"                            \
                 :: "r"(static_cast<uint32_t>(condition)), "l"(to), reg(static_cast<held>(value)) : "memory");     \
  }
KVNB_ACCESS(uint8_t, "u8", "h", uint16_t)
KVNB_ACCESS(uint16_t, "u16", "h", uint16_t)
KVNB_ACCESS(uint32_t, "u32", "r", uint32_t)
KVNB_ACCESS(uint64_t, "u64", "l", uint64_t)
#undef KVNB_ACCESS

__device__ __forceinline__ uint4 load(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

__device__ __forceinline__ void store_if(bool condition, uint4* to, const uint4& value) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v4.u32 [%1], {%2, %3, %4, %5};}"
               :: "r"(static_cast<uint32_t>(condition)), "l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// A slot, loaded to stay in L2, in front of rows: one step's slots serve every layer.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define KVNB_SLOT(type, ptx, reg)                                                                                  \
  __device__ __forceinline__ type load_to_stay(const type* from) {                                                 \
    uint64_t policy;                                                                                               \
    type value;                                                                                                    \
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));                                     \
    asm volatile("ld.global.L2::cache_hint." ptx " %0, [%1], %2;" : "=" reg(value) : "l"(from), "l"(policy));      \
    return value;                                                                                                  \
  }
KVNB_SLOT(uint32_t, "u32", "r")
KVNB_SLOT(uint64_t, "u64", "l")
#undef KVNB_SLOT
#else
template <typename Slot>
__device__ __forceinline__ Slot load_to_stay(const Slot* from) { return load(from); }
#endif

// What the tuned kernel needs. Strides count vectors: 32 bits hold them, products are 64-bit.
struct CacheStrides {
  uint32_t slot;
  uint32_t block_extra;  // block_stride - block_size * slot_stride: 0 where blocks lie one behind the other
  uint32_t head;
};

struct FastPlan {
  // for the loads
  const void* slots;
  const uint4* key_source;
  const uint4* value_source;
  uint32_t num_threads;
  Divisor threads_per_token;
  uint32_t key_token_stride;  // of the source, whose heads lie one behind the other
  uint32_t value_token_stride;
  // for the stores
  uint4* key_cache;
  uint4* value_cache;
  CacheStrides key;
  CacheStrides value;
  uint32_t num_slots;
  Divisor pairs_per_head;
  Divisor slots_per_block;
};
// Constants are fetched in lines of 64 bytes; on sm_90 parameters begin 16 bytes into one, at 0x210.
static_assert(offsetof(FastPlan, key_cache) == 64 - 16, "what the loads need is one line");
static_assert(offsetof(FastPlan, slots_per_block.divisor) == 128 - 16, "what the stores need is the next");

__device__ __forceinline__ void wait_for_producer() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In every kernel before it reads or writes memory. A kernel that one launched dependently lets in must griddepcontrol.wait
// before it touches what that one, or any before it, reads or writes.
template <Launch kLaunch>
__device__ __forceinline__ void begin() {
  if constexpr (kLaunch == Launch::kDependent) let_next_kernel_launch();
  if constexpr (kLaunch != Launch::kPlain) wait_for_producer();
  if constexpr (kLaunch == Launch::kDependentLate) let_next_kernel_launch();
}

// A slot as it is stored: uint64_t and uint32_t stand for int64 and int32.
__device__ __forceinline__ int64_t slot_of(uint64_t stored) { return static_cast<int64_t>(stored); }
__device__ __forceinline__ int64_t slot_of(uint32_t stored) { return static_cast<int32_t>(stored); }

// The tuned kernels. No branch before the loads: threads past the end load the last pairs again and store nothing.
//
// Any row of whole vectors. A thread's pairs lie threads_per_token apart in its token's row: neighbours load neighbouring
// vectors, one slot serves all.
template <typename Slot, int kPairs, Launch kLaunch>
__global__ void __launch_bounds__(kBlock<kPairs, kLaunch>, kPairs == 1 ? 1 : 8)
    fast_kernel(const __grid_constant__ FastPlan plan) {
  begin<kLaunch>();
  const uint32_t mine = blockIdx.x * kBlock<kPairs, kLaunch> + threadIdx.x;
  const uint32_t thread = min(mine, plan.num_threads - 1);
  const uint32_t apart = plan.threads_per_token.divisor;
  const uint32_t token = plan.threads_per_token.quotient(thread);
  const uint32_t first = thread - token * apart;
  const Slot* at = static_cast<const Slot*>(plan.slots) + token;
  const Slot stored = kPairs == 1 ? load_to_stay(at) : load(at);
  const uint4* key_from = plan.key_source + (uint64_t{token} * plan.key_token_stride + first);
  const uint4* value_from = plan.value_source + (uint64_t{token} * plan.value_token_stride + first);
  uint4 key[kPairs], value[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) key[i] = load(key_from + i * apart);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) value[i] = load(value_from + i * apart);

  const int64_t slot = slot_of(stored);
  const uint32_t low = static_cast<uint32_t>(slot);  // the whole slot, where it is one
  const uint32_t block = plan.slots_per_block.quotient(low);
  const bool written = mine < plan.num_threads && kvnb::is_written(slot, plan.num_slots);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const uint32_t head = plan.pairs_per_head.quotient(first + i * apart);
    const uint32_t vector = first + i * apart - head * plan.pairs_per_head.divisor;
    auto to = [&](uint4* cache, const CacheStrides& strides) {
      return cache + (uint64_t{head} * strides.head + vector) +
             (uint64_t{low} * strides.slot + uint64_t{block} * strides.block_extra);
    };
    store_if(written, to(plan.key_cache, plan.key), key[i]);
    store_if(written, to(plan.value_cache, plan.value), value[i]);
  }
}

// Rows, heads and blocks of powers of two, K and V with the same strides: everything is one line of constants.
struct CompactPlan {
  const void* slots;
  const uint4* key_source;
  uint4* key_cache;
  int32_t value_source;  // vectors from key_source
  int32_t value_cache;   // vectors from key_cache
  uint32_t num_slots;
  uint32_t block_extra;
  uint32_t token_stride : 24;  // of the source
  uint32_t missing : 8;        // threads of the last block that have no pair
  uint32_t row_shift : 5;      // of the numbers of vectors that a token's row and a head's have,
  uint32_t head_shift : 5;
  uint32_t slot_stride_shift : 5;  // and that lie from slot to slot and from head to head in the cache
  uint32_t head_stride_shift : 5;
  uint32_t block_shift : 5;
};
static_assert(sizeof(CompactPlan) == 64 - 16, "one line, see FastPlan");

// The same with heads of the source apart, as in [num_kv_heads, num_tokens, head_size]: one constant of a second line.
struct ApartPlan : CompactPlan {
  uint32_t source_head_stride;
};

// Rows, heads and blocks of any size, K and V with the same strides: divisions, and a second line for the stores.
struct DividedPlan {
  // for the loads
  const void* slots;
  const uint4* key_source;
  int32_t value_source;  // vectors from key_source
  uint32_t num_pairs;
  uint32_t token_stride;  // of the source
  Divisor pairs_per_token;
  // for the stores
  int32_t value_cache;  // vectors from key_cache
  uint32_t num_slots;
  uint4* key_cache;
  CacheStrides strides;
  Divisor pairs_per_head;
  Divisor slots_per_block;
};
static_assert(offsetof(DividedPlan, key_cache) == 64 - 16, "see FastPlan");

// A pair's token, and its place in that token's row.
struct Place {
  uint32_t token;
  uint32_t within;
};

__device__ __forceinline__ uint32_t last_pair(const CompactPlan& plan, uint32_t threads) { return threads - 1 - plan.missing; }
__device__ __forceinline__ uint32_t last_pair(const DividedPlan& plan, uint32_t) { return plan.num_pairs - 1; }

__device__ __forceinline__ Place place_of(const CompactPlan& plan, uint32_t pair) {
  const uint32_t token = pair >> plan.row_shift;
  return {token, pair - (token << plan.row_shift)};
}
__device__ __forceinline__ Place place_of(const DividedPlan& plan, uint32_t pair) {
  const uint32_t token = plan.pairs_per_token.quotient(pair);
  return {token, pair - token * plan.pairs_per_token.divisor};
}

// Vectors from the source's row of a token, and from the cache, to a pair's K.
template <typename Plan>
__device__ __forceinline__ uint64_t in_source(const Plan&, uint32_t within) {
  return within;
}
__device__ __forceinline__ uint64_t in_source(const ApartPlan& plan, uint32_t within) {
  const uint32_t head = within >> plan.head_shift;
  return uint64_t{head} * plan.source_head_stride + (within - (head << plan.head_shift));
}
__device__ __forceinline__ uint64_t in_cache(const CompactPlan& plan, uint32_t slot, uint32_t within) {
  const uint32_t head = within >> plan.head_shift;
  const uint32_t vector = within - (head << plan.head_shift);
  return (uint64_t{slot} << plan.slot_stride_shift) + ((head << plan.head_stride_shift) + vector) +
         uint64_t{slot >> plan.block_shift} * plan.block_extra;
}
__device__ __forceinline__ uint64_t in_cache(const DividedPlan& plan, uint32_t slot, uint32_t within) {
  const uint32_t head = plan.pairs_per_head.quotient(within);
  const uint32_t vector = within - head * plan.pairs_per_head.divisor;
  return uint64_t{slot} * plan.strides.slot + (uint64_t{head} * plan.strides.head + vector) +
         uint64_t{plan.slots_per_block.quotient(slot)} * plan.strides.block_extra;
}

// The plan; its second line, if it has one for the stores, reached so that ptxas cannot fetch it before `address` is
// computed, where a load would wait for it: behind an index, 0, as no address has its highest bit.
template <typename Plan>
__device__ __forceinline__ const Plan& behind(const void*, const Plan& plan) {
  return plan;
}
__device__ __forceinline__ const DividedPlan& behind(const void* address, const DividedPlan& plan) {
  uint32_t zero = static_cast<uint32_t>(reinterpret_cast<uint64_t>(address) >> 63);
  asm volatile("" : "+r"(zero));
  return (&plan)[zero];
}

template <typename Plan, typename Slot, bool kWholeBlocks, bool kSlotsStay, Launch kLaunch>
__global__ void __launch_bounds__(kBlock<1, kLaunch>) pair_kernel(const __grid_constant__ Plan plan) {
  begin<kLaunch>();
  const uint32_t mine = blockIdx.x * kBlock<1, kLaunch> + threadIdx.x;
  const uint32_t last = last_pair(plan, gridDim.x * kBlock<1, kLaunch>);
  const auto [token, within] = place_of(plan, kWholeBlocks ? mine : min(mine, last));
  const Slot* at = static_cast<const Slot*>(plan.slots) + token;
  const Slot stored = kSlotsStay ? load_to_stay(at) : load(at);
  const uint4* key_from = plan.key_source + (uint64_t{token} * plan.token_stride + in_source(plan, within));
  const uint4* value_from = key_from + plan.value_source;
  const uint4 key = load(key_from);
  const uint4 value = load(value_from);

  const Plan& late = behind(value_from, plan);
  const int64_t slot = slot_of(stored);
  uint4* to = late.key_cache + in_cache(late, static_cast<uint32_t>(slot), within);
  const bool written = (kWholeBlocks || mine <= last) && kvnb::is_written(slot, late.num_slots);
  store_if(written, to, key);
  store_if(written, to + late.value_cache, value);
}

// Everything else: narrow vectors, heads of the source apart where ApartPlan cannot serve them, K and V heads of
// different sizes, strides beyond 32 bits, 2^31 slots and more.
struct GeneralPlan {
  Rows key;
  Rows value;
  const void* slots;
  int64_t num_slots;
  int64_t block_size;
  uint32_t num_pairs;
  uint32_t key_vectors;  // vectors of one head's row
  uint32_t value_vectors;
  Divisor pairs_per_token;
  Divisor pairs_per_head;
  bool slots_are_64bit;
};

template <typename Vector, Launch kLaunch>
__global__ void __launch_bounds__(kThreads) general_kernel(const __grid_constant__ GeneralPlan plan) {
  const uint32_t pair = blockIdx.x * kThreads + threadIdx.x;
  begin<kLaunch>();
  if (pair >= plan.num_pairs) return;
  const uint32_t token = plan.pairs_per_token.quotient(pair);
  const uint32_t within = pair - token * plan.pairs_per_token.divisor;
  const uint32_t head = plan.pairs_per_head.quotient(within);
  const uint32_t vector = within - head * plan.pairs_per_head.divisor;
  const bool in_key = vector < plan.key_vectors, in_value = vector < plan.value_vectors;
  const int64_t slot = plan.slots_are_64bit ? slot_of(load(static_cast<const uint64_t*>(plan.slots) + token))
                                            : slot_of(load(static_cast<const uint32_t*>(plan.slots) + token));
  Vector key = {}, value = {};
  if (in_key) key = load(reinterpret_cast<const Vector*>(kvnb::source_row(plan.key, token, head)) + vector);
  if (in_value) value = load(reinterpret_cast<const Vector*>(kvnb::source_row(plan.value, token, head)) + vector);
  const bool written = kvnb::is_written(slot, plan.num_slots);
  const int64_t at = written ? slot : 0;  // a wild slot's address is never computed
  const int64_t block = at / plan.block_size, offset = at % plan.block_size;
  store_if(written && in_key, reinterpret_cast<Vector*>(kvnb::cache_row(plan.key, block, offset, head)) + vector, key);
  store_if(written && in_value, reinterpret_cast<Vector*>(kvnb::cache_row(plan.value, block, offset, head)) + vector, value);
}

// ---------------------------------------------------------------------------------------------------- host

// Heads that lie one behind the other, in source and cache, are one long row: fewer divisions, wider vectors.
bool is_one_row(const Rows& rows, int64_t num_heads) {
  return num_heads == 1 || (rows.source_head_stride == rows.head_bytes && rows.head_stride == rows.head_bytes);
}

uint64_t alignment_bits(const Rows& rows) {
  return reinterpret_cast<uintptr_t>(rows.source) | reinterpret_cast<uintptr_t>(rows.cache) | rows.source_token_stride |
         rows.source_head_stride | rows.block_stride | rows.slot_stride | rows.head_stride | rows.head_bytes;
}

template <Launch kLaunch, typename Plan>
cudaError_t launch(void (*kernel)(Plan), const Plan& plan, uint32_t num_threads, int per_block, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((num_threads - 1) / per_block + 1);
  config.blockDim = dim3(per_block);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = kLaunch == Launch::kPlain ? 0 : 1;
  return cudaLaunchKernelEx(&config, kernel, plan);
}

template <Launch kLaunch>
cudaError_t launch_general(const GeneralPlan& plan, int64_t width, cudaStream_t stream) {
  auto of = [&](auto* kernel) { return launch<kLaunch>(kernel, plan, plan.num_pairs, kThreads, stream); };
  switch (width) {
    case 16: return of(general_kernel<uint4, kLaunch>);
    case 8: return of(general_kernel<uint64_t, kLaunch>);
    case 4: return of(general_kernel<uint32_t, kLaunch>);
    case 2: return of(general_kernel<uint16_t, kLaunch>);
    default: return of(general_kernel<uint8_t, kLaunch>);
  }
}

// Whether a tuned kernel can serve one side, of whole 16-byte vectors: strides that fit 32 bits.
bool is_fast(const Rows& rows, int64_t block_size) {
  const int64_t extra = rows.block_stride - block_size * rows.slot_stride;
  for (int64_t stride : {rows.source_token_stride, rows.source_head_stride, rows.slot_stride, extra, rows.head_stride})
    if (stride < 0 || stride / 16 > UINT32_MAX) return false;
  return true;
}

bool has_heads_in_a_row(const Rows& rows) { return rows.source_head_stride == rows.head_bytes; }

uint32_t vectors(int64_t bytes) { return static_cast<uint32_t>(bytes / 16); }

CacheStrides cache_strides(const Rows& rows, int64_t block_size) {
  return {vectors(rows.slot_stride), vectors(rows.block_stride - block_size * rows.slot_stride), vectors(rows.head_stride)};
}

// Waves of threads that pairs make, one each.
double waves_of(int64_t num_pairs) {
  return static_cast<double>(num_pairs) / static_cast<double>(Capacity::of_gpu().threads);
}

// The next kernel launches late beside copies of 1/15 to 2/5 of a wave of threads. Let in first thing, copies of that size
// that follow each other on data that L2 holds can fall into step, and then take 1.9 to 2.1 us each, whatever their size.
// And late beside 3/5 to 17/20 of a wave, which is faster with inputs just produced. Why is not known of either.
Launch launch_of(int64_t num_pairs, bool dependent) {
  if (!dependent) return Launch::kPlain;
  const double waves = waves_of(num_pairs);
  const bool late = (waves > 1.0 / 15 && waves <= 0.4) || (waves > 0.6 && waves <= 0.85);
  return late ? Launch::kDependentLate : Launch::kDependent;
}

// More than one pair a thread: a copy that would take more than one wave of threads with one each (launched dependently,
// where blocks of the next kernel take the places that are left, 23/16 or 6/5), and that L2 holds easily, sources and rows.
// As many pairs as leave neighbouring threads a line of 128 bytes to share: four, or two in short rows, as long as all
// threads are resident at once, which have 40 registers then.
template <Launch kLaunch>
int pairs_each(int64_t num_pairs, uint32_t pairs_per_token) {
  constexpr bool kPlain = kLaunch == Launch::kPlain;
  const double waves = waves_of(num_pairs);
  if (num_pairs * 64 > Capacity::of_gpu().l2_bytes / 16 * 9) return 1;
  if (pairs_per_token >= 32 && pairs_per_token % 4 == 0) return waves > (kPlain ? 1 : 23.0 / 16) ? 4 : 1;
  const bool two = pairs_per_token >= 16 && pairs_per_token % 2 == 0 && waves > (kPlain ? 1 : 1.2) && waves <= 1.5;
  return two ? 2 : 1;
}

// Slots are loaded to stay in L2, unless the copy is of 3/5 of a wave of threads to three and they are many; where divisions
// find the rows, half as many, any number from 4/5 of a wave on, and any number launched dependently. Rows' own loads are up
// to 12 % faster there. Why is not known.
template <Launch kLaunch, typename Plan>
bool slots_stay(int64_t num_tokens, int64_t num_pairs) {
  const double waves = waves_of(num_pairs);
  if (waves <= 0.6 || waves > 3) return true;
  if constexpr (std::is_same_v<Plan, DividedPlan>) return kLaunch == Launch::kPlain && waves <= 0.8 && num_tokens < 4096;
  return num_tokens < 8192;
}

template <typename Slot, int kPairs, Launch kLaunch>
cudaError_t launch_fast(const FastPlan& plan, cudaStream_t stream) {
  return launch<kLaunch>(fast_kernel<Slot, kPairs, kLaunch>, plan, plan.num_threads, kBlock<kPairs, kLaunch>, stream);
}

template <typename Slot, Launch kLaunch, typename Plan>
cudaError_t launch_pairs(Plan plan, int64_t num_tokens, uint32_t num_pairs, cudaStream_t stream) {
  constexpr uint32_t kThreadsEach = kBlock<1, kLaunch>;
  const uint32_t missing = (kThreadsEach - num_pairs % kThreadsEach) % kThreadsEach;
  if constexpr (std::is_base_of_v<CompactPlan, Plan>) plan.missing = missing;
  auto kernel = [missing](auto stay) {
    constexpr bool kStay = decltype(stay)::value;
    return missing == 0 ? pair_kernel<Plan, Slot, true, kStay, kLaunch> : pair_kernel<Plan, Slot, false, kStay, kLaunch>;
  };
  const auto chosen = slots_stay<kLaunch, Plan>(num_tokens, num_pairs) ? kernel(std::true_type()) : kernel(std::false_type());
  return launch<kLaunch>(chosen, plan, num_pairs, kThreadsEach, stream);
}

// The plan of a pair kernel that divides; nothing where K and V, which the fast kernel can serve, do not lie alike.
std::optional<DividedPlan> divided(const FastPlan& plan) {
  const int64_t source_apart = plan.value_source - plan.key_source, cache_apart = plan.value_cache - plan.key_cache;
  if (plan.key.slot != plan.value.slot || plan.key.block_extra != plan.value.block_extra ||
      plan.key.head != plan.value.head || plan.key_token_stride != plan.value_token_stride ||
      source_apart != static_cast<int32_t>(source_apart) || cache_apart != static_cast<int32_t>(cache_apart))
    return {};
  return DividedPlan{plan.slots, plan.key_source, static_cast<int32_t>(source_apart), plan.num_threads,
                     plan.key_token_stride, plan.threads_per_token, static_cast<int32_t>(cache_apart), plan.num_slots,
                     plan.key_cache, plan.key, plan.pairs_per_head, plan.slots_per_block};
}

bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

uint32_t log2_of(int64_t power) { return static_cast<uint32_t>(__builtin_ctzll(power)); }

// The same in one line; nothing where it does not fit.
std::optional<CompactPlan> compact(const DividedPlan& plan, int64_t num_heads) {
  for (uint32_t number : {plan.pairs_per_token.divisor, plan.pairs_per_head.divisor, plan.strides.slot, plan.strides.head,
                          plan.slots_per_block.divisor})
    if (!is_power_of_two(number)) return {};
  if (plan.token_stride >= 1 << 24 || num_heads * plan.strides.head > UINT32_MAX) return {};
  CompactPlan one_line = {plan.slots, plan.key_source, plan.key_cache, plan.value_source, plan.value_cache, plan.num_slots,
                          plan.strides.block_extra};
  one_line.token_stride = plan.token_stride;
  one_line.row_shift = log2_of(plan.pairs_per_token.divisor);
  one_line.head_shift = log2_of(plan.pairs_per_head.divisor);
  one_line.slot_stride_shift = log2_of(plan.strides.slot);
  one_line.head_stride_shift = log2_of(plan.strides.head);
  one_line.block_shift = log2_of(plan.slots_per_block.divisor);
  return one_line;
}

// Nothing where no tuned kernel serves the problem.
template <typename Slot, Launch kLaunch>
std::optional<cudaError_t> launch_tuned(const Problem& problem, FastPlan plan, cudaStream_t stream) {
  const uint32_t num_pairs = plan.num_threads, pairs = plan.threads_per_token.divisor;
  const int64_t tokens = problem.num_tokens;
  const auto divisions = divided(plan);
  const auto one_line = divisions ? compact(*divisions, problem.num_heads) : std::nullopt;
  if (!has_heads_in_a_row(problem.key) || !has_heads_in_a_row(problem.value)) {
    if (!one_line || problem.key.source_head_stride != problem.value.source_head_stride) return {};
    const ApartPlan apart = {*one_line, vectors(problem.key.source_head_stride)};
    return launch_pairs<Slot, kLaunch>(apart, tokens, num_pairs, stream);
  }
  if constexpr (kLaunch != Launch::kDependentLate)  // which has fewer than a wave
    if (const int each = pairs_each<kLaunch>(num_pairs, pairs); each > 1) {
      plan.num_threads /= each;
      plan.threads_per_token = Divisor(pairs / each);
      return each == 4 ? launch_fast<Slot, 4, kLaunch>(plan, stream) : launch_fast<Slot, 2, kLaunch>(plan, stream);
    }
  if (one_line) return launch_pairs<Slot, kLaunch>(*one_line, tokens, num_pairs, stream);
  if (divisions) return launch_pairs<Slot, kLaunch>(*divisions, tokens, num_pairs, stream);
  return launch_fast<Slot, 1, kLaunch>(plan, stream);
}

// One launch: at most kMostPairsPerLaunch pairs.
template <Launch kLaunch>
cudaError_t copy_tokens(const Problem& problem, int64_t width, cudaStream_t stream) {
  const Rows &key = problem.key, &value = problem.value;
  const uint32_t key_vectors = static_cast<uint32_t>(key.head_bytes / width);
  const uint32_t value_vectors = static_cast<uint32_t>(value.head_bytes / width);
  const uint32_t per_head = key_vectors > value_vectors ? key_vectors : value_vectors;
  const Divisor pairs_per_head(per_head);
  const Divisor pairs_per_token(per_head * static_cast<uint32_t>(problem.num_heads));
  const uint32_t num_pairs = static_cast<uint32_t>(problem.num_tokens) * pairs_per_token.divisor;

  if (width == 16 && key_vectors == value_vectors && problem.num_slots <= INT32_MAX && is_fast(key, problem.block_size) &&
      is_fast(value, problem.block_size)) {
    const FastPlan plan = {problem.slots,
                           reinterpret_cast<const uint4*>(key.source),
                           reinterpret_cast<const uint4*>(value.source),
                           num_pairs,
                           pairs_per_token,
                           vectors(key.source_token_stride),
                           vectors(value.source_token_stride),
                           reinterpret_cast<uint4*>(key.cache),
                           reinterpret_cast<uint4*>(value.cache),
                           cache_strides(key, problem.block_size),
                           cache_strides(value, problem.block_size),
                           static_cast<uint32_t>(problem.num_slots),
                           pairs_per_head,
                           Divisor(static_cast<uint32_t>(problem.block_size))};
    const auto launched = problem.slots_are_64bit ? launch_tuned<uint64_t, kLaunch>(problem, plan, stream)
                                                  : launch_tuned<uint32_t, kLaunch>(problem, plan, stream);
    if (launched) return *launched;
  }
  const GeneralPlan plan = {key, value, problem.slots, problem.num_slots, problem.block_size, num_pairs, key_vectors,
                            value_vectors, pairs_per_token, pairs_per_head, problem.slots_are_64bit};
  return launch_general<kLaunch>(plan, width, stream);
}

cudaError_t copy_tokens(const Problem& problem, int64_t width, Launch launch, cudaStream_t stream) {
  switch (launch) {
    case Launch::kPlain: return copy_tokens<Launch::kPlain>(problem, width, stream);
    case Launch::kDependent: return copy_tokens<Launch::kDependent>(problem, width, stream);
    default: return copy_tokens<Launch::kDependentLate>(problem, width, stream);
  }
}

}  // namespace

extern "C" int kvnb_copy_cuda(const Problem* whole, bool dependent, void* stream) {
  if (Capacity::of_gpu().error != cudaSuccess) return Capacity::of_gpu().error;
  Problem problem = *whole;
  if (is_one_row(problem.key, problem.num_heads) && is_one_row(problem.value, problem.num_heads)) {
    for (Rows* rows : {&problem.key, &problem.value}) {
      rows->head_bytes *= problem.num_heads;
      rows->source_head_stride = rows->head_stride = rows->head_bytes;
    }
    problem.num_heads = 1;
  }
  if (problem.block_size == 1)  // blocks lie as slots would
    for (Rows* rows : {&problem.key, &problem.value}) rows->slot_stride = rows->block_stride;
  const uint64_t bits = alignment_bits(problem.key) | alignment_bits(problem.value) | 16;
  const int64_t width = static_cast<int64_t>(bits & (~bits + 1));
  const int64_t longer = problem.key.head_bytes > problem.value.head_bytes ? problem.key.head_bytes : problem.value.head_bytes;
  const int64_t pairs_per_token = longer / width * problem.num_heads;
  const int64_t tokens_per_launch = kMostPairsPerLaunch / pairs_per_token;
  if (tokens_per_launch == 0) return cudaErrorInvalidConfiguration;

  // indices inside a launch are 32-bit; a longer problem takes several launches
  for (int64_t token = 0; token < whole->num_tokens; token += tokens_per_launch) {
    problem.num_tokens = whole->num_tokens - token < tokens_per_launch ? whole->num_tokens - token : tokens_per_launch;
    problem.slots = static_cast<const char*>(whole->slots) + token * (whole->slots_are_64bit ? 8 : 4);
    problem.key.source = whole->key.source + token * whole->key.source_token_stride;
    problem.value.source = whole->value.source + token * whole->value.source_token_stride;
    const Launch launch = launch_of(problem.num_tokens * pairs_per_token, dependent);
    const cudaError_t error = copy_tokens(problem, width, launch, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
