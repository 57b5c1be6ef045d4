// Add a segment to the arena: `dense` is its memory, `first_group` its number, `end_group` its chunks; by the number it
// lies in the device's memory or the host's.
// One block; the counter of free chunks rises last, so nobody searches for a chunk that is not there.
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void grow_arena(const __grid_constant__ Args a) {
    const u32 words = a.end_group / 32, first = a.first_group * words;
    for (u32 i = threadIdx.x; i < words; i += 256)
        a.arena->bitmap[first + i] = 0;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        a.arena->segments[a.first_group] = (u64)a.dense;
        const bool host = first >= HOST_CHUNKS / 32;
        if (host)
            a.arena->host_words = first + words - HOST_CHUNKS / 32;
        else
            a.arena->bitmap_words = first + words;
        __threadfence();
        atomicAdd(host ? &a.arena->host_free : &a.arena->free_chunks, (int)a.end_group);
    }
}
