// Give back the chunks of payloads that are gone. `dense` holds their serial numbers, sorted, `capacity` of them; where
// it is null there is one, `serial`. A thread looks at a chunk, and at others where the arena has grown since a capture.
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void sweep_chunks(const __grid_constant__ Args a) {
    let_next_start();
    const u32* gone = a.dense ? (const u32*)a.dense : &a.serial;
    // In closed segments all count as taken, and nobody has them.
    const u32 own = a.arena->bitmap_words * 32, chunks = own + a.arena->host_words * 32;
    for (u32 number = blockIdx.x * (WARPS * 32) + threadIdx.x; number < chunks; number += gridDim.x * (WARPS * 32)) {
        const u32 chunk = number < own ? number : HOST_CHUNKS + number - own;
        if (!(a.arena->bitmap[chunk >> 5] >> (chunk & 31) & 1u)) continue;
        const u32 owner = *chunk_owner(a.arena, chunk);
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
}
