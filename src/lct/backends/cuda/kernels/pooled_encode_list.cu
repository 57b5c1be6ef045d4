// Encode several tensors in one launch (pooled_encode.cuh).
extern "C" __global__ __launch_bounds__(WARPS * 32,
                                        MIN_BLOCKS) void pooled_encode_list(const __grid_constant__ TensorList list) {
    const u32 number = tensor_of_block(list);
    encode_block(list.tensors[number], blockIdx.x - list.first_block[number]);
}
