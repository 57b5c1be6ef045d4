// Give back the chunks of payloads that are gone. `dense` holds their serial numbers, sorted, `capacity` of
// them. One thread a chunk, of all that may lie in open segments.
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void sweep_chunks(const __grid_constant__ Args a) {
    u32 chunk = blockIdx.x * (WARPS * 32) + threadIdx.x;
    // In closed segments all count as taken, and nobody has them.
    if (chunk >> 5 >= a.arena->bitmap_words || !(a.arena->bitmap[chunk >> 5] >> (chunk & 31) & 1u)) return;
    const u32 *gone = (const u32*)a.dense, owner = *chunk_owner(a.arena, chunk);
    u32 low = 0, high = a.capacity;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (gone[middle] < owner)
            low = middle + 1;
        else
            high = middle;
    }
    if (low < a.capacity && gone[low] == owner) free_chunk(a.arena, chunk);
}
