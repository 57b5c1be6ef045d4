// Close the last segments of the arena, from the highest down to one that holds a taken chunk. `first_group` segments,
// of `end_group` chunks, and `capacity` free chunks stay in any case. One warp, a lane for a word of the bitmap.
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void close_segments(const __grid_constant__ Args a) {
    const u32 words = a.end_group / 32, lane = threadIdx.x, keep = a.first_group * words;
    u32 end = a.arena->bitmap_words;
    while (end > keep) {
        // Credit first, then the words: as whoever takes a chunk.
        bool spare = false;
        if (lane == 0) {
            int left = atomicSub(&a.arena->free_chunks, (int)a.end_group) - (int)a.end_group;
            spare = left >= (int)a.capacity;
        }
        u32* word = a.arena->bitmap + end - words + lane;
        bool mine = __shfl_sync(FULL_WARP, spare, 0) && lane < words && !atomicCAS(word, 0u, ALL_TAKEN);
        if (__popc(__ballot_sync(FULL_WARP, mine)) < words) {
            if (mine) atomicExch(word, 0u);
            __threadfence();
            __syncwarp();
            if (lane == 0) atomicAdd(&a.arena->free_chunks, (int)a.end_group);
            break;
        }
        end -= words;
    }
    if (lane == 0) {
        a.arena->bitmap_words = end;
        a.arena->home_words = keep;
    }
}
