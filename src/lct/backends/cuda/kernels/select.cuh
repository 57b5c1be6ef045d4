// The book of a tensor, chosen from a sample (docs/format.md, section 5). The sample is at most 8,192 values.
#define SAMPLED_SPANS 32
#define MOST_BOOKS    16

__device__ __forceinline__ u64 sample_start(u64 k, u64 samples, u64 total) {
    if (total <= samples) return k;
    u64 first = k * total / samples, end = (k + 1) * total / samples;
    u32 jitter = ((u32)(k + 1) * 2654435761u) >> 8;
    return first + jitter % (end - first);
}

// Of pooled streams, by a whole block; the book is in `best` and `totals` is scratch, both in shared memory.
__device__ __forceinline__ void select_pooled(const Args& a, u32 (&totals)[MOST_BOOKS], u32& best) {
    const u32 lane = threadIdx.x % 32;
    if (threadIdx.x < MOST_BOOKS) totals[threadIdx.x] = 0;
    if (threadIdx.x == 0) best = ~0u;
    __syncthreads();
    // A warp adds up what a span costs with each book: 16 books at once, a byte each.
    const uint4* costs = (const uint4*)(a.tables + (size_t)NUM_BOOKS * TABLE_WORDS);
    const u64 spans = (a.num_values + 255) / 256;
    const u32 samples = spans < SAMPLED_SPANS ? (u32)spans : SAMPLED_SPANS;
    for (u32 sample = warp_number(); sample < samples; sample += warps()) {
        u64 start = sample_start(sample, SAMPLED_SPANS, spans) * 256;
        u32 e[8], sum = 0, nonzero = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u64 i = start + j * 32 + lane;
            e[j] = i < a.num_values ? (word_of(dense_at(a.dense, i)) >> 7) & 255u : 256u;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum += e[j] & 255u;
            nonzero += e[j] > 0 && e[j] < 256u;
        }
        sum = __reduce_add_sync(FULL_WARP, sum);
        nonzero = __reduce_add_sync(FULL_WARP, nonzero);
        u32 shift = nonzero ? (sum + nonzero / 2) / nonzero : 0u;
        u32 bits[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            uint4 row = costs[symbol_of(e[j] & 255u, shift)];
            bool counts = e[j] < 256u;       // positions past the end do not
            bits[0] += counts ? row.x : 0u;  // at most 16 bits a value: 8 values do not carry
            bits[1] += counts ? row.y : 0u;
            bits[2] += counts ? row.z : 0u;
            bits[3] += counts ? row.w : 0u;
        }
        u32 mine = 0;  // lane k of the first 8: books 4 (k / 2) + k % 2 and, 16 bits higher, that + 2
#pragma unroll
        for (int k = 0; k < 8; k++) {
            u32 both = __reduce_add_sync(FULL_WARP, bits[k / 2] >> (8 * (k & 1)) & 0x00ff00ffu);
            mine = lane == k ? both : mine;
        }
        if (lane < 8) {
            u32 book = lane / 2 * 4 + (lane & 1);
            atomicAdd(&totals[book], mine & 0xffffu);
            atomicAdd(&totals[book + 2], mine >> 16);
        }
    }
    __syncthreads();
    // Totals are below 2^24, and the least of equal ones has the lower number.
    if (threadIdx.x < MOST_BOOKS && a.candidates >> threadIdx.x & 1u)
        atomicMin(&best, totals[threadIdx.x] << 8 | threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) best &= 255u;
    __syncthreads();
}

// The header word by word: `book` and `shift` filled in.
__device__ __forceinline__ u32 header_word(const Args& a, u32 word, u32 book, u32 shift) {
    u32 value = a.header[word];
    if (word == 0) value = (value & 0x00ffffffu) | book << 24;
    if (word == 1) value = (value & 0xffffff00u) | shift;
    return value;
}

// Write the header of a payload of pooled streams. A whole block of 1,024 threads calls.
__device__ __forceinline__ void select_for_pooled(const Args& a) {
    __shared__ u32 totals[MOST_BOOKS], book;
    select_pooled(a, totals, book);
    if (threadIdx.x < 4) ((u32*)a.payload)[threadIdx.x] = header_word(a, threadIdx.x, book, 0);
    wait_for_previous();  // so that the encode waits for the sweep
}
