// Give back the chunks of payloads that are gone. `dense` holds their serial numbers, sorted, `capacity` of
// them; `end_group` is the number of chunks in the arena. One thread a chunk.
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void sweep_chunks(const __grid_constant__ Args a) {
    u32 chunk = blockIdx.x * (WARPS * 32) + threadIdx.x;
    if (chunk >= a.end_group || !(a.arena->bitmap[chunk >> 5] >> (chunk & 31) & 1u)) return;
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
