// Choose the book (and, for fixed streams, the shift) of a tensor from a sample and write the payload's
// header (select.cuh). One block of 1,024 threads.
#define THREADS        (WARPS * 32)
#define SAMPLED_VALUES 4096
#define SYMBOLS        257

#if POOLED
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void select_book(const __grid_constant__ Args a) {
    let_next_start();
    select_for_pooled(a);
}
#else
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void select_book(const __grid_constant__ Args a) {
    __shared__ u32 counts[SYMBOLS + 3], occurring[256], num_occurring;
    __shared__ u64 best;
    const u32 thread = threadIdx.x, lane = thread % 32;
    let_next_start();
    for (u32 i = thread; i < SYMBOLS; i += THREADS)
        counts[i] = 0;
    if (thread == 0) {
        best = ~0ull;
        num_occurring = 0;
    }
    __syncthreads();
    u32 samples = a.num_values < SAMPLED_VALUES ? (u32)a.num_values : SAMPLED_VALUES;
    for (u32 k = thread; k < samples; k += THREADS) {
        u64 i = sample_start(k, SAMPLED_VALUES, a.num_values);
        atomicAdd(&counts[(word_of(dense_at(a.dense, i)) >> 7) & 255u], 1u);
    }
    __syncthreads();
    // Exponents that occur, as exponent | count << 8: a few of the 256.
    if (thread < 256 && counts[thread]) occurring[atomicAdd(&num_occurring, 1u)] = thread | counts[thread] << 8;
    __syncthreads();
    u32 shift = thread & 255u;
    for (u32 book = thread / 256; book < 32; book += THREADS / 256) {
        if (!(a.candidates >> book & 1u)) continue;
        const u32* cost = a.tables + (size_t)book * TABLE_WORDS + TABLE_COST;
        u32 total = 0;
        for (u32 k = 0; k < num_occurring; k++)
            total += (occurring[k] >> 8) * cost[symbol_of(occurring[k] & 255u, shift)];
        // One candidate a warp: atomics of 64 bits on one word would take the time of the search.
        u64 candidate = (u64)total << 16 | book << 8 | shift;
        for (int d = 16; d; d >>= 1) {
            u64 other = __shfl_xor_sync(FULL_WARP, candidate, d);
            candidate = other < candidate ? other : candidate;
        }
        if (lane == 0) atomicMin(&best, candidate);
    }
    __syncthreads();
    if (thread < 4) ((u32*)a.payload)[thread] = header_word(a, thread, (u32)(best >> 8) & 255u, (u32)best & 255u);
    wait_for_previous();  // so that the encode waits for the sweep
}
#endif
