// Give the chunks of a payload back to the arena. One thread a group.
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void release_chunks(const __grid_constant__ Args a) {
    u32 group = blockIdx.x * 256 + threadIdx.x;
    if (group >= a.end_group) return;
    u32 state = ((const u32*)(a.payload + a.meta_offset))[group];
    if ((state >> 24) & STATE_SPILLED) free_chunk(a.arena, state & REF_MASK);
    if (state >> 24 == STATE_WIDE) {
        const u32* refs = (const u32*)(a.payload + slot_offset(a, group));
        free_chunk(a.arena, state & REF_MASK);
        free_chunk(a.arena, refs[0]);
        free_chunk(a.arena, refs[1]);
    }
}
