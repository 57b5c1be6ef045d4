// Decode one tensor (pooled_decode.cuh).
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void pooled_decode(const __grid_constant__ Args a) {
    decode_block(a, blockIdx.x);
}
