// Encode one tensor (pooled_encode.cuh).
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_BLOCKS) void pooled_encode(const __grid_constant__ Args a) {
    encode_block(a, blockIdx.x);
}
