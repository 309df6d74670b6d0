"""Triton kernels of the SparseMoE block, one source for CUDA and Intel XPU.

What is computed is defined by the references in the folder above; here is how, and what it costs.

Stages (paper, Algorithm 1), for R = T * K rows of E experts:
  index_tokens  counts in blocks of 8 tokens, one prefix sum over (expert, block), numbers. No atomics.
  products      grouped products of rows with their expert's matrix. gate and up share one pass over x and leave through
                SwiGLU and the routing weight; the product with down^T, in backward, leaves through SwiGLU's backward
                and makes the routing weights' gradient. fp32 sums; TF32 only where torch is set to it.
  outer         the matrices' gradients: sums over an expert's rows, added in fp32 to the optimizer's bucket.
  sum_rows      the sum over a token's rows by inverse index, forward for y and backward for dx.
Every result has one writer and one order of additions: repeats are bit for bit equal.

Schedule. A persistent grid of one program a multiprocessor walks over the tiles; each program derives the schedule from
offsets_E in registers (blocks.py), so the host never learns how many rows an expert got. Within an expert `group` row
tiles run side by side through the columns: they share blocks of the expert's matrix in L2.

Loads. On CUDA x's rows are gathered while they are loaded; matrices and contiguous rows come through tensor descriptors
(Hopper's copy engine) where they are 16-byte aligned. XPU loads two-dimensional blocks fast and gathers slowly: there
rows are gathered once into contiguous memory, every operand has a descriptor, and the expert is grid axis 1.

Memory. Saved for backward: x, the routing, and gate_up [R, 2I]; h is computed again. Of size [R, H] are y in forward,
dy and dx in backward, and nothing that stays. For OLMoE-7B's layer and 4,096 tokens in bf16 145 MiB are saved, where
transformers' grouped_mm saves 513 (rows of x, gate and up, their product, the outputs).

Operations and bytes of OLMoE-7B's layer (H = 2048, I = 1024, E = 64, K = 8), T = 4,096 tokens, bf16, and the least time
on a PVC tile (207 TFLOP/s, 1.0 TB/s) and an H200 (989 TFLOP/s, 4.8 TB/s), each stage at the slower of its two limits.
Each operand is read once, each result written once, gradients are read and written; a product takes 2 R H I operations,
gate with up twice that. bench/roofline.py has each stage's sum, and python -m bench.roofline prints:

    stage                  GFLOP     MB   PVC ms  H200 ms
    index                      0      1     0.00     0.00
    gate, up, SwiGLU         275    755     1.33     0.28
    down                     137    470     0.66     0.14
    sum of rows                0    151     0.15     0.03
    dy of rows                 0    151     0.15     0.03
    dh, SwiGLU backward      137    738     0.74     0.15
    ddown                    137    738     0.74     0.15
    dgate, dup               275   1225     1.33     0.28
    dx of rows               275    805     1.33     0.28
    sum of dx                  0    151     0.15     0.03
    all                     1237   5185     6.58     1.37

At 4,096 tokens computing and copying take the products about as long (64 experts of 512 rows). With more tokens an
expert they are bound by computing, and what is left to win is the four passes over rows beside them. Whether the
kernels reach these times on a GPU has not been measured: bench/gpu.py does that.
"""
