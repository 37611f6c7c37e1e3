"""The chips there are: one row each, every number with its source or marked as an assumption.

Sources, by the letters that the rows use: [tpu_info] JAX's Pallas table of TPU generations; [cloud] Google Cloud's system architecture
pages; [book] the scaling book (JAX); [cann] CANN's platform file Ascend910A.ini; [course] the MindSpore 1.0 course notes on on-device
execution; [perf] Sophgo's PerfAI tables; [tt] torch-tpu's tools/examples/tpu.json and OpCounter; [mlir] tpu-mlir's BM1690.h;
[mlperf] the system files of MLPerf training results 1.0; [tpu_v4] Jouppi et al., TPU v4 (2023); [prng] cycles measured on a TPU of two
cores at 1.05 GHz (ayaka14732.github.io/pallas-tpu-tutorial, chapter 4, section 6). "derived" is arithmetic on such numbers, "assumed" has
no source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpuflow.chips.chip import Chip

KIB, MIB, GIB = 2**10, 2**20, 2**30

_TPU: Mapping[str, Any] = {
    "family": "tpu",
    "matrix_rows": 128, "matrix_columns": 128, "matrix_load_cycles": 128,
    "vector_sublanes": 8, "vector_lanes": 128, "vector_units": 2, "random_words": 128,
    "acc_bytes": 4 * MIB, "smem_bytes": 16 * KIB,
    "matrix_f32_as": "bf16",
    "hbm_burst_bytes": 64,
    "host_bytes_per_second": 16e9, "launch_seconds": 110e-6, "network_bytes_per_second": 6.25e9, "collective_seconds": 3e-6,
    "dma_seconds": 0.5e-6, "issue_cycles": 10.0, "hbm_efficiency": 0.85, "matrix_efficiency": 1.0,
    "link_efficiency": 0.9,
}  # fmt: skip
_FROM_V6E: Mapping[str, Any] = {
    "matrix_rows": 256, "matrix_columns": 256, "matrix_units": 2, "matrix_inputs": 2, "matrix_load_cycles": 256, "matrix_s8_passes": 0.5,
    "acc_bytes": 16 * MIB, "vector_units": 4, "vector_packs": 1, "host_bytes_per_second": 32e9,
}  # fmt: skip
"""What generations from v6e on share: arrays of 256 x 256, lanes, the link to the host; accumulators for a product of 2,048 x 2,048 in f32,
which MaxText's attention computes in one piece (sa_block_q, sa_block_kv_compute of tpu-recipes, training/trillium)."""
_TPU_SOURCE = (
    "1 us a hop, a quarter of a host's 25 GB/s of network, 8 us for a gather of 32 KB over three hops on v5e, of which 3 are neither its "
    "hops nor its bytes [book], 0.9 of the links' bandwidth sustained by gathers of 67 MB on v7x (tpu-recipes, Ironwood); "
    "registers of 8 x 128 lanes [book], one of random bits every 8 cycles, which all generations' generators are taken to make [prng]; f32 "
    "products as one bf16 pass, three or six (jax.lax.Precision); launch 110 us: dispatch and wait on a TPU VM, TPU microbenchmarks; "
    "accumulators 4 MiB (from v6e on 16: tpu-recipes), bursts of 64 bytes, DMA start-up, issue and HBM efficiency assumed"
)

_SOPHGO: Mapping[str, Any] = {
    "family": "sophgo",
    "clock_hz": 1.0e9,
    "matrix_rows": 64, "matrix_columns": 128, "matrix_units": 1, "matrix_f32_passes": 8.0, "matrix_s8_passes": 0.5,
    "vector_sublanes": 64, "vector_lanes": 16, "vector_units": 1, "vector_packs": 1,
    "vmem_bytes": 16 * MIB, "acc_bytes": 4 * MIB, "smem_bytes": 16 * KIB,
    "launch_seconds": 0.55e-6,
}  # fmt: skip


def _tpu(**fields: Any) -> Chip:
    """A TPU generation: what all of them share, and its own numbers."""
    source = f"{fields.pop('source')}; {_TPU_SOURCE}"
    return Chip(**{**_TPU, **fields, "source": source})


def _sophgo(**fields: Any) -> Chip:
    """A Sophgo processor: its cores are alike, their number and the memory differ."""
    return Chip(**{**_SOPHGO, **fields})


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="generic",
            cores=1,
            clock_hz=1.0e9,
            matrix_rows=128,
            matrix_columns=128,
            matrix_units=1,
            vector_sublanes=8,
            vector_lanes=128,
            vector_units=2,
            vmem_bytes=16 * MIB,
            vmem_bytes_per_second=4.4e12,
            acc_bytes=4 * MIB,
            smem_bytes=16 * KIB,
            hbm_bytes=16 * GIB,
            hbm_bytes_per_second=800e9,
            host_bytes_per_second=16e9,
            launch_seconds=100e-6,
            matrix_load_cycles=128,
            link_chips=256,
            link_axes=2,
            link_bytes_per_second=200e9,
            network_bytes_per_second=6.25e9,
            source="no product: a plain chip with true fp32 products, sizes, links included, between TPU v2 and v3 (all assumed)",
        ),
        Chip(
            name="ascend910",
            family="ascend",
            cores=32,
            clock_hz=1.0e9,
            matrix_rows=16,
            matrix_columns=16,
            matrix_inputs=16,
            matrix_units=1,
            matrix_s8_passes=0.5,
            matrix_f32_as="f16",
            vector_sublanes=4,
            vector_lanes=16,
            vector_units=1,
            vector_packs=1,
            vmem_bytes=1 * MIB + 256 * KIB,
            acc_bytes=256 * KIB,
            smem_bytes=16 * KIB,
            hbm_bytes=32 * GIB,
            hbm_parameter_bytes=5 * GIB,
            hbm_feature_bytes=26 * GIB,
            hbm_collective_bytes=1 * GIB,
            hbm_bytes_per_second=1.2e12,
            core_hbm_bytes_per_second=128e9,
            hbm_burst_bytes=32,
            cache_bytes=32 * MIB,
            core_cache_bytes_per_second=110e9,
            host_bytes_per_second=32e9,
            link_chips=4,
            link_bytes_per_second=90e9,
            host_chips=8,
            network_bytes_per_second=12.5e9,
            launch_seconds=100e-6,
            dma_seconds=1.0e-6,
            issue_cycles=20.0,
            power_watts=310.0,
            source="32 AI cores with six pipelines, 32 GB of HBM as 5 (parameters) + 26 (feature maps) + 1 (collectives), 128 GB/s a core "
            "[course]; cube 16x16x16 f16 or 16x32x16 s8 a cycle at 1 GHz, no f32 (cast to f16), vector 256 bytes a cycle, L0C 256 KB, L1 1 "
            "MB + UB 256 KB as one vector memory, blocks of 32 bytes, L2 of 32 MB at 110 bytes a cycle and core [cann]; HBM 1.2 TB/s "
            "(maker; [cann] counts 1.02), PCIe 4 x16, 310 W; 8 chips a host, two meshes of 4 by three HCCS links of 240 "
            "Gb/s (each way: assumed), joined by PCIe, RoCE of 100 Gb/s a chip [mlperf]; bf16 (which the cube lacks) priced as f16, "
            "registers, launch, DMA start-up and issue assumed",
        ),
        _sophgo(
            name="bm1684x",
            cores=1,
            vmem_bytes_per_second=1.0e12,
            hbm_bytes=16 * GIB,
            hbm_bytes_per_second=68e9,
            host_bytes_per_second=8e9,
            source="64 lanes of 64 bytes, 16 TF f16 and bf16, 2 TF f32, 32 TOPS s8 [perf]; local memory 256 KB a lane, 64 bytes "
            "a cycle and lane, a quarter of it for a move: read and written, loads beside stores; clock, split of the "
            "matrix unit, 68 GB/s of LPDDR4x, 16 GB, PCIe and launch (as bm1690) assumed",
        ),
        _sophgo(
            name="bm1690",
            cores=8,
            vmem_bytes_per_second=1.0e12,
            hbm_bytes=128 * GIB,
            hbm_bytes_per_second=546e9,
            hbm_efficiency=0.9,
            host_bytes_per_second=16e9,
            source="8 cores x 16 TF f16, 2 TF f32, 128 GB of LPDDR5 at 546 GB/s of which 0.9 is used, launch 0.25 us + sync 0.3 us [tt]; "
            "256 TOPS s8 [perf]; 64 lanes of 64 bytes, 256 KB of local memory each [mlir]; its rate, as bm1684x's, "
            "clock, split of the matrix unit, accumulators and host link assumed",
        ),
        _tpu(
            name="tpu-v2",
            cores=2,
            clock_hz=0.7e9,
            matrix_units=1,
            vmem_bytes=16 * MIB,
            vmem_bytes_per_second=2.1e12,
            hbm_bytes=16 * GIB,
            hbm_bytes_per_second=716e9,
            core_hbm_bytes_per_second=358e9,
            power_watts=280.0,
            link_chips=256,
            link_axes=2,
            link_ring_chips=16,
            link_bytes_per_second=240e9,
            source="2D torus of 16 x 16 that closes on axes of 16, four links of 60 GB/s each way [book]; "
            "46 TF, 16 GB at 716 GB/s [tpu_info]; 2 cores of one 128x128 array; clock derived from the peak; 280 W, "
            "and as many bytes a cycle to and from VMEM as v5e, assumed",
        ),
        _tpu(
            name="tpu-v3",
            cores=2,
            clock_hz=0.94e9,
            matrix_units=2,
            vmem_bytes=16 * MIB,
            vmem_bytes_per_second=2.8e12,
            hbm_bytes=32 * GIB,
            hbm_bytes_per_second=900e9,
            core_hbm_bytes_per_second=450e9,
            power_watts=262.0,
            link_chips=4096,
            link_axes=2,
            link_ring_chips=32,
            link_bytes_per_second=400e9,
            source="2D torus, four links of 100 GB/s each way [book], four pods of 1024 joined as in MLPerf 0.7; "
            "123 TF, 2 cores of two 128x128 arrays, 32 GiB at 900 GB/s, 123 W at least, 220 on average and 262 at most [cloud] "
            "([tpu_info] has 140 TF and 825 GB/s); clock derived from the peak; as many bytes a cycle to and from VMEM as v5e assumed",
        ),
        _tpu(
            name="tpu-v4",
            cores=2,
            clock_hz=1.05e9,
            matrix_units=4,
            vmem_bytes=16 * MIB,
            hbm_bytes=32 * GIB,
            hbm_bytes_per_second=1.23e12,
            cache_bytes=128 * MIB,
            core_cache_bytes_per_second=1.0e12,
            cmem_bytes=128 * MIB,
            power_watts=192.0,
            link_chips=4096,
            link_axes=3,
            link_ring_chips=4,
            link_bytes_per_second=270e9,
            source="3D torus of 16 x 16 x 16, six links of 45 GB/s each way [book]; "
            "275 TF, 2 cores of four 128x128 arrays, 32 GiB at 1.23 TB/s, 90 W at least, 170 on average and 192 at most [cloud]; "
            "128 MiB of CMEM, which the compiler fills [tpu_v4]: arrays that stay, and what kernels read again soon; 1 TB/s a core assumed",
        ),
        _tpu(
            name="tpu-v5e",
            cores=1,
            clock_hz=1.5e9,
            matrix_units=4,
            matrix_s8_passes=0.5,
            vector_units=4,
            vmem_bytes=128 * MIB,
            vmem_bytes_per_second=4.5e12,
            hbm_bytes=16 * GIB,
            hbm_bytes_per_second=819e9,
            link_chips=256,
            link_axes=2,
            link_ring_chips=16,
            link_bytes_per_second=180e9,
            source="2D torus of 16 x 16 that closes on axes of 16, four links of 45 GB/s each way [book]; "
            "197 TF, 394 TOPS s8, four 128x128 arrays, 16 GiB at 819 GB/s [cloud]; VMEM 128 MiB [tpu_info], 22 times the HBM bandwidth "
            "[book], a quarter of it for a move: read and written, loads beside stores; clock derived from the peak",
        ),
        _tpu(
            name="tpu-v5p",
            cores=2,
            clock_hz=1.75e9,
            matrix_units=4,
            matrix_s8_passes=0.5,
            vector_units=4,
            vmem_bytes=64 * MIB,
            vmem_bytes_per_second=5.2e12,
            hbm_bytes=95 * GIB,
            hbm_bytes_per_second=2.765e12,
            link_chips=8960,
            link_axes=3,
            link_ring_chips=4,
            link_bytes_per_second=540e9,
            source="3D torus of 16 x 20 x 28, six links of 90 GB/s each way [book]; "
            "459 TF, 918 TOPS s8, 2 cores, 95 GiB at 2.765 TB/s [cloud] ([tpu_info] has 2.46); VMEM 64 MiB a core [tpu_info], as many "
            "bytes a cycle as v5e assumed; clock derived from the peak",
        ),
        _tpu(
            name="tpu-v6e",
            **_FROM_V6E,
            cores=1,
            clock_hz=1.75e9,
            vmem_bytes=128 * MIB,
            vmem_bytes_per_second=9.0e12,
            hbm_bytes=32 * GIB,
            hbm_bytes_per_second=1.64e12,
            link_chips=256,
            link_axes=2,
            link_ring_chips=16,
            link_bytes_per_second=360e9,
            source="2D torus of 16 x 16 that closes on axes of 16, four links of 90 GB/s each way [book]; "
            "918 TF, two 256x256 arrays, 32 GiB at 1.64 TB/s [cloud]; VMEM 128 MiB, 1,840 TOPS s8 [tpu_info], its rate as v5e's; clock "
            "1.75 GHz and two rows a cycle derived from the peak; 16-bit vector arithmetic assumed",
        ),
        _tpu(
            name="tpu-v7x",
            **_FROM_V6E,
            cores=2,
            clock_hz=2.2e9,
            vmem_bytes=64 * MIB,
            vmem_bytes_per_second=6.6e12,
            hbm_bytes=192 * GIB,
            hbm_bytes_per_second=7.38e12,
            core_hbm_bytes_per_second=3.69e12,
            link_chips=9216,
            link_axes=3,
            link_ring_chips=4,
            link_bytes_per_second=600e9,
            source="3D torus, 1,200 GB/s a chip both ways together [cloud], its extent assumed; "
            "2,307 TF, 192 GiB at 7.38 TB/s (tpu-recipes, Ironwood); 2 cores that are 2 devices; arrays as v6e, VMEM, "
            "its bytes a cycle as v5e's, clock from the peak assumed",
        ),
    )
}
