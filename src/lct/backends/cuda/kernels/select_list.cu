// Choose the books of several tensors in one launch and write their payloads' headers (select.cuh). A block of 1,024
// threads takes a tensor, whatever the list says of blocks.
extern "C" __global__ __launch_bounds__(WARPS * 32,
                                        MIN_BLOCKS) void select_books(const __grid_constant__ TensorList list) {
    let_next_start();
    select_for_pooled(list.tensors[blockIdx.x]);
}
