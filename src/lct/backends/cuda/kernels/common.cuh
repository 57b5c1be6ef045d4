// What every kernel shares: types, the launch argument, splitting values into exponents and
// sign-fraction bytes (docs/format.md, sections 2 and 3). Constants in capitals that are not defined
// here are prepended by jit.py: the kernel's row (DTYPE, POOLED, STEPS, GROUPS_PER_BLOCK, WARPS), sizes of tables,
// its launch bounds (MIN_BLOCKS) and a step's options.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FULL_WARP      0xffffffffu
#define STATE_CODED    0x00u
#define STATE_CONSTANT 0x01u
#define STATE_WIDE     0x02u
#define STATE_SPILLED  0x80u
#define REF_MASK       0x00ffffffu
#define NO_CHUNK       0xffffffffu

#define GROUP_VALUES  (STEPS * 128)
#define QUADS_PER_ROW (32 * GROUPS_PER_BLOCK)

// Mirrors jit.Args (ctypes): pointers first, then 64-bit, then 32-bit fields.
struct Args {
    u8* payload;
    void* dense;  // source of an encode, destination of a decode
    struct Arena* arena;
    const u32* tables;  // the bank, TABLE_WORDS words a book
    u64 num_values;
    u64 sign_fraction_offset, low_offset, lane_offset, meta_offset, tail_slot_offset, size_bytes;
    u32 first_group, end_group;  // the groups of this launch
    u32 num_groups, full_groups, tail_steps;
    u32 capacity, tail_capacity;
    u32 fresh;    // 1: the payload's meta plane holds nothing yet
    u32 reserve;  // 1: take worst-case credit from the arena before writing (captured graphs)
    u32 serial;   // of the payload, in the arena's table of owners
    u32 header[4];
    u32 candidates;  // bit b: book b may be chosen
    u32 book;        // the book to use, or NO_CHUNK: read it from the payload's header
};

// One row of the bank on the device (codebook_tables in jit.py). A delta is a symbol minus 128, modulo 256: what
// is added to a shift, modulo 256, to give the exponent.
//   singles[256]   indexed by 8 stream bits: length | ZERO_FLAG | ESC_FLAG | delta << 23
//   pairs[4096]    indexed by 12 stream bits, which hold two codes: their length | delta << 7 | second delta << 23
//                  | PAIR_ZEROS where they are ZERO; or PAIR_SLOW: they do not fit, or one is ESC
//   encode[260]    indexed by symbol 0..256: length | code << 8 | ESCAPED
//   encode_pairs[424]  indexed by two symbols inside a window of 16, low + 27 * high: length | code << 16, or
//                  SLOW if either escapes
//   cost[260]      bits that symbol 0..256 costs
//   window         symbol that the window of encode_pairs starts at
// Behind the last book stand costs of all books: 16 bytes a symbol 0..256, one a book.
#define TABLE_SINGLES      0
#define TABLE_PAIRS        (TABLE_SINGLES + SINGLES_WORDS)
#define TABLE_ENCODE       (TABLE_PAIRS + PAIRS_WORDS)
#define TABLE_ENCODE_PAIRS (TABLE_ENCODE + ENCODE_WORDS)
#define TABLE_COST         (TABLE_ENCODE_PAIRS + ENCODE_PAIRS_WORDS)
#define TABLE_WINDOW       (TABLE_COST + COST_WORDS)
#define TABLE_WORDS        (TABLE_WINDOW + 4)
#define ESC_FLAG           0x8000u
#define ZERO_FLAG          0x4000u
#define PAIR_SLOW          0x00010000u
#define PAIR_ZEROS         0x80008000u
#define ESCAPED            0x80000000u
#define SLOW               0x20u
#define ZERO_SYMBOL        256u

// Byte offset of the slot of `group`.
__device__ __forceinline__ u64 slot_offset(const Args& a, u32 group) {
    const u32 streams = POOLED ? 1 : 32;  // fixed: capacity is a stream's
    if (group < a.full_groups) return 16 + (u64)group * a.capacity * (4 * streams);
    return a.tail_slot_offset + (u64)(group - a.full_groups) * a.tail_capacity * (4 * streams);
}

__device__ __forceinline__ const u32* slot_in_payload(const Args& a, u32 group) {
    return (const u32*)(a.payload + slot_offset(a, group));
}

// The chunk that the present state of `group` refers to, or NO_CHUNK. Wide groups are never rewritten.
__device__ __forceinline__ u32 held_chunk(const Args& a, u32 group) {
    u32 state = ((const u32*)(a.payload + a.meta_offset))[group];
    return (state >> 24) & STATE_SPILLED ? state & REF_MASK : NO_CHUNK;
}

// A group of a captured encode for which there was no room: an old one stays as it is. A new one would be whatever the
// memory held: it becomes a constant, so that a decode reads no chunk. One warp calls.
__device__ __forceinline__ void leave_group(const Args& a, u32 group, u32 lane) {
    if (a.fresh && lane == 0) ((u32*)(a.payload + a.meta_offset))[group] = STATE_CONSTANT << 24;
}

// Unused bytes are zero: the gaps between planes, at most 31 bytes each. One warp calls.
__device__ __forceinline__ void clear_gaps(const Args& a, u32 lane) {
    const u64 low_bytes = DTYPE == 2 ? 2 * a.num_values : DTYPE == 3 ? (a.num_values + 7) / 8 * 3 : 0;
    const u64 from[3] = {a.sign_fraction_offset + a.num_values, a.low_offset + low_bytes,
                         a.meta_offset + 4ull * a.num_groups};
    const u64 to[3] = {a.low_offset, a.lane_offset, a.size_bytes};
#pragma unroll
    for (int gap = 0; gap < 3; gap++)
        if (from[gap] + lane < to[gap]) a.payload[from[gap] + lane] = 0;
}

// What belongs to no group: gaps, and the header where no sample chose the book. One warp calls.
__device__ __forceinline__ void begin_payload(const Args& a, u32 lane) {
    clear_gaps(a, lane);
    if (lane < 4 && a.book != NO_CHUNK) ((u32*)a.payload)[lane] = a.header[lane];
}

__device__ __forceinline__ const u32* book_tables(const Args& a) {
    u32 book = a.book == NO_CHUNK ? (u32)a.payload[3] : a.book;
    return a.tables + (size_t)book * TABLE_WORDS;
}

// Exponents of four words where they stand, at bits 7..14 and 23..30: the form in which kernels keep a quad.
// Two of them, or one and a shift, add up without a carry between the halves.
#define EXPONENTS    0x7f807f80u
#define BOTH_HALVES7 0x00800080u  // 1 << 7 in both halves
__device__ __forceinline__ uint2 exponents(uint2 v) { return make_uint2(v.x & EXPONENTS, v.y & EXPONENTS); }

// Bits of `a` where `mask` is 0, of `b` where it is 1. In assembly: the compiler would take two LOP3.
__device__ __forceinline__ u32 blend(u32 a, u32 b, u32 mask) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xd8;" : "=r"(out) : "r"(a), "r"(b), "r"(mask));
    return out;
}

// Sign-fraction bytes of four words.
__device__ __forceinline__ u32 sign_fractions4(uint2 v) {
    return blend(__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.x, v.y, 0x7531), 0x80808080u);
}

// Four words from sign-fraction bytes and exponents that stand at bits 7..14 and 23..30 of x and y;
// other bits of x and y are ignored.
__device__ __forceinline__ uint2 join4(u32 sf, u32 x, u32 y) {
    return make_uint2(blend(__byte_perm(sf, 0, 0x1100), x, EXPONENTS), blend(__byte_perm(sf, 0, 0x3322), y, EXPONENTS));
}

// Two BF16 values as floats, and back, rounded to nearest even.
__device__ __forceinline__ float2 unpack2(u32 v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
__device__ __forceinline__ u32 pack2(float2 v) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(v.y), "f"(v.x));
    return out;
}

// Exponent bytes of a quad, in order.
__device__ __forceinline__ u32 exponent_bytes(uint2 e) { return __byte_perm(e.x >> 7, e.y >> 7, 0x6420); }

// Four words from sign-fraction bytes and exponent bytes.
__device__ __forceinline__ uint2 join_bytes4(u32 sf, u32 e) {
    return join4(sf, __byte_perm(e, 0, 0x4140) << 7, __byte_perm(e, 0, 0x4342) << 7);
}

// Index into encode tables of an exponent relative to a shift.
__device__ __forceinline__ u32 symbol_of(u32 exponent, u32 shift) {
    return exponent ? (exponent - shift + 128u) & 255u : ZERO_SYMBOL;
}

// Byte offset into encode_pairs of two symbols, relative to the window, at bits 7..15 and 23..31. For symbols outside
// the window it is of no account, but a multiple of 4 below 2,048, so that reading there is allowed.
__device__ __forceinline__ u32 pair_offset(u32 r) { return (r * (0x10000u + PAIR_STRIDE)) >> 21; }
// Bits that are set where a symbol lies outside the window.
#define OUTSIDE_WINDOW 0x78007800u
// What is added to exponents to give symbols relative to the window. `origin`: window_origin(window). Right for
// shifts of 16 and more; smaller ones would carry between the halves.
__device__ __forceinline__ u32 window_origin(u32 window) { return (128u + 256u - window) * BOTH_HALVES7; }
__device__ __forceinline__ u32 rotation(u32 origin, u32 shift) { return origin - shift * BOTH_HALVES7; }
// Whether exponent 0, which is ZERO whatever the shift, or a carry could look like a symbol of the window.
__device__ __forceinline__ bool shift_is_near_zero(u32 shift) { return shift - 16u >= 224u; }

// Codes of two pairs of values from encode_pairs as one code.
__device__ __forceinline__ u32 quad_code(u32 x, u32 y) { return __funnelshift_l(0u, x >> 16, y) | y >> 16; }

// Start a copy of 16 bytes to shared memory; `stage_wait` waits for all that the thread started.
__device__ __forceinline__ void stage16(u32* to, const u32* from) {
    u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(address), "l"(from));
}
__device__ __forceinline__ void stage_wait() {
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
}
// Start copying a slot, one warp; `words` is a multiple of 4, both are aligned to 16 bytes.
__device__ __forceinline__ void stage_slot(const u8* from, u32* to, u32 words, u32 lane) {
    for (u32 i = lane * 4; i < words; i += 128)
        stage16(to + i, (const u32*)from + i);
}
// Start copying a table, all threads of the block; they must meet after `stage_wait`.
__device__ __forceinline__ void stage_table(u32* to, const u32* from, u32 words) {
    for (u32 i = threadIdx.x * 4; i < words; i += blockDim.x * 4)
        stage16(to + i, from + i);
}

// A search for a book lets the encode after it start while it runs, a sweep in a captured graph the search (`early` in
// jit.py). What was launched before those has ended by then.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Wait for the kernel that was launched before this one, and for those it waits for; see what they wrote.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Bring what follows soon into L2, a line a lane: `bytes`, a multiple of 16. One warp calls. Registers for loads this far
// ahead would cost resident warps. (Loads of what was prefetched must not be evict-first, `__ldcs`: docs/performance.md,
// Notebook.)
__device__ __forceinline__ void prefetch(const void* from, u32 bytes, u32 lane) {
    for (u32 i = lane * 128; i < bytes; i += 4096)
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8*)from + i));
}
// The same for the little that a decode reads, all lines in one instruction; `from` is a multiple of 16.
__device__ __forceinline__ void prefetch_at_once(const void* from, u32 bytes, u32 lane) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; setp.eq.u32 p, %2, 0; @p cp.async.bulk.prefetch.L2.global [%0], %1;}" ::"l"(from),
                 "r"(bytes), "r"(lane));
#else
    prefetch(from, bytes, lane);
#endif
}

// Steps whose bytes are fetched at a time (docs/performance.md, Notebook).
#define PREFETCH_STEPS 8
__device__ __forceinline__ bool prefetch_is_due(u32 step) {
    return step % PREFETCH_STEPS == 0 && step + PREFETCH_STEPS < STEPS;
}

// Keeps a value in a register: the compiler would otherwise derive it again at each use.
__device__ __forceinline__ u32 opaque(u32 value) {
    u32 out;
    asm("mov.u32 %0, %1;" : "=r"(out) : "r"(value));
    return out;
}

// Code that runs rarely goes out of line, so that the common path has no taken branch.
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

// Number of the warp in its block. Through a shuffle the compiler knows that it is the same in all lanes, and with it
// all that follows from it: else it guards every vote against divergence.
__device__ __forceinline__ u32 warp_number() { return __shfl_sync(FULL_WARP, threadIdx.x / 32, 0); }

// Warps of the block; a launch may take fewer than WARPS, so that all multiprocessors get the same share.
__device__ __forceinline__ u32 warps() { return blockDim.x / 32; }

// First value of the quad of (group, step, lane).
__device__ __forceinline__ u64 quad_index(u32 group, u32 step, u32 lane) {
#if GROUPS_PER_BLOCK == 1
    return (u64)group * GROUP_VALUES + step * 128 + lane * 4;
#else
    u32 block = group / GROUPS_PER_BLOCK, part = group % GROUPS_PER_BLOCK;
    u32 column = (part * 32 + lane - 4 * step) & (QUADS_PER_ROW - 1);
    return (u64)block * (GROUP_VALUES * GROUPS_PER_BLOCK) + step * (QUADS_PER_ROW * 4) + column * 4;
#endif
}

// ---- Dense values: DTYPE 1 BF16, 2 FP32, 3 FP16, 4 FP32 holding BF16 ----
#if DTYPE == 2 || DTYPE == 4
#define VALUE_BYTES 4
#else
#define VALUE_BYTES 2
#endif

struct Quad {
    uint2 words;
    uint2 low;  // FP32: four 16-bit halves; FP16: four 3-bit values at bits 0..2 of each half
};

__device__ __forceinline__ u32 dense_at(const void* p, u64 i) {
#if VALUE_BYTES == 4
    return ((const u32*)p)[i];
#else
    return ((const u16*)p)[i];
#endif
}

__device__ __forceinline__ u32 word_of(u32 value) {
#if VALUE_BYTES == 4
    return value >> 16;
#elif DTYPE == 3
    return (value & 0x8000u) | ((value >> 3) & 0x0fffu);
#else
    return value;
#endif
}

__device__ __forceinline__ Quad split_quad(uint4 v) {
    Quad q;
#if VALUE_BYTES == 4
    q.words = make_uint2(__byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632));
    q.low = make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410));
#elif DTYPE == 3
    q.words =
        make_uint2((v.x & 0x80008000u) | ((v.x >> 3) & 0x0fff0fffu), (v.y & 0x80008000u) | ((v.y >> 3) & 0x0fff0fffu));
    q.low = make_uint2(v.x & 0x00070007u, v.y & 0x00070007u);
#else
    q.words = make_uint2(v.x, v.y);
    q.low = make_uint2(0, 0);
#endif
    return q;
}

__device__ __forceinline__ uint4 merge_quad(Quad q) {
#if VALUE_BYTES == 4
    return make_uint4(__byte_perm(q.low.x, q.words.x, 0x5410), __byte_perm(q.low.x, q.words.x, 0x7632),
                      __byte_perm(q.low.y, q.words.y, 0x5410), __byte_perm(q.low.y, q.words.y, 0x7632));
#elif DTYPE == 3
    return make_uint4((q.words.x & 0x80008000u) | ((q.words.x & 0x0fff0fffu) << 3) | q.low.x,
                      (q.words.y & 0x80008000u) | ((q.words.y & 0x0fff0fffu) << 3) | q.low.y, 0, 0);
#else
    return make_uint4(q.words.x, q.words.y, 0, 0);
#endif
}

// Quads are 8 (16) bytes and the tensors start at a multiple of 16: see codec.py.
__device__ __forceinline__ uint4 load_dense(const void* p, u64 i) {
#if VALUE_BYTES == 4
    return *(const uint4*)((const u32*)p + i);
#else
    uint2 v = *(const uint2*)((const u16*)p + i);
    return make_uint4(v.x, v.y, 0, 0);
#endif
}

__device__ __forceinline__ void store_dense(void* p, u64 i, uint4 v) {
#if VALUE_BYTES == 4
    *(uint4*)((u32*)p + i) = v;
#else
    *(uint2*)((u16*)p + i) = make_uint2(v.x, v.y);
#endif
}

// The same near the end of the tensor: values past it read as +0 and are not written.
__device__ __forceinline__ uint4 load_dense_guarded(const void* p, u64 i, u64 n) {
    u32 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        v[j] = i + j < n ? dense_at(p, i + j) : 0u;
#if VALUE_BYTES == 4
    return make_uint4(v[0], v[1], v[2], v[3]);
#else
    return make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, 0, 0);
#endif
}

__device__ __forceinline__ void store_dense_guarded(void* p, u64 i, u64 n, uint4 v) {
    u32 parts[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (i + j >= n) return;
#if VALUE_BYTES == 4
        ((u32*)p)[i + j] = parts[j];
#else
        ((u16*)p)[i + j] = (u16)(parts[j >> 1] >> (16 * (j & 1)));
#endif
    }
}

// Low plane of a quad at value i. FP16 packs 8 values (two neighbouring lanes) into 3 bytes, so all
// lanes of a warp must call these together.
__device__ __forceinline__ void store_low(u8* plane, u64 i, u64 n, uint2 low) {
#if DTYPE == 2
    if (i < n) *(uint2*)(plane + 2 * i) = low;  // the plane is a multiple of 8 values long
#elif DTYPE == 3
    u32 bits = (low.x & 7) | (low.x >> 16) << 3 | (low.y & 7) << 6 | (low.y >> 16) << 9;
    u32 other = __shfl_xor_sync(FULL_WARP, bits, 1);
    if (!(i & 4) && i < n) {
        u8* unit = plane + i / 8 * 3;
        bits |= other << 12;
        unit[0] = (u8)bits, unit[1] = (u8)(bits >> 8), unit[2] = (u8)(bits >> 16);
    }
#endif
}

__device__ __forceinline__ uint2 load_low(const u8* plane, u64 i, u64 n) {
#if DTYPE == 2
    return i < n ? *(const uint2*)(plane + 2 * i) : make_uint2(0, 0);
#elif DTYPE == 3
    u32 bits = 0;
    if (i < n) {
        const u8* unit = plane + i / 8 * 3;
        bits = (unit[0] | unit[1] << 8 | unit[2] << 16) >> (i & 4 ? 12 : 0);
    }
    return make_uint2((bits & 7) | (bits & 0x38) << 13, (bits >> 6 & 7) | (bits >> 6 & 0x38) << 13);
#else
    return make_uint2(0, 0);
#endif
}
