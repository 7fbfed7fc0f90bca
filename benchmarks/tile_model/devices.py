"""Resources of a multiprocessor of each modelled GPU, and how many programs fit in one."""

from __future__ import annotations

from dataclasses import dataclass

from .binaries import Usage

KIB = 1024


@dataclass(frozen=True)
class Device:
    """A GPU, and one of its multiprocessors.

    Attributes:
        arch: as tables of tiles name it.
        name: the GPU that represents the architecture.
        multiprocessors: how many it has.
        tb_per_s: of its memory, by its maker's data sheet.
        latency_ns: from a load to its value, of memory that is busy. An assumption, no figure of a maker's.
        warp_size: threads of a warp.
        schedulers: parts of a multiprocessor, among which warps and registers are divided.
        registers: of a scheduler, in values of 32 bits a lane.
        register_unit: what a lane is given registers by.
        warps: that a scheduler holds at most.
        programs: of several warps that a multiprocessor holds at most.
        single_warp_programs: the most programs of one warp: on AMD's they take none of the barriers that limit others.
        shared_bytes: of a multiprocessor.
        reserved_bytes: of shared memory, for each program.
    """

    arch: str
    name: str
    multiprocessors: int
    tb_per_s: float
    latency_ns: int
    warp_size: int
    schedulers: int
    registers: int
    register_unit: int
    warps: int
    programs: int
    single_warp_programs: int
    shared_bytes: int
    reserved_bytes: int

    def needed_bytes(self, read_share: float) -> float:
        """By Little's law, what a multiprocessor has to have on its way for its share of the bandwidth.

        Args:
            read_share: the share of moved bytes that are read: no load waits for stores.
        """
        return self.tb_per_s * 1e12 * read_share * self.latency_ns * 1e-9 / self.multiprocessors

    def resident(self, usage: Usage) -> tuple[int, str]:
        """How many programs a multiprocessor holds at once, and what keeps another out."""
        warps = -(-usage.threads // self.warp_size)
        given = max(1, -(-usage.registers // self.register_unit)) * self.register_unit
        shared = usage.shared_bytes + self.reserved_bytes
        # Warps of a program are dealt out to schedulers, so that all of them together have as many places.
        most = {
            "registers": min(self.registers // given, self.warps) * self.schedulers // warps,
            "warps": self.warps * self.schedulers // warps,
            "programs": self.programs if warps > 1 else self.single_warp_programs,
            "shared": self.shared_bytes // shared if shared else self.programs * self.warps,
        }
        # Among equals, the limit that no tile changes.
        limit = min(("programs", "warps", "shared", "registers"), key=most.__getitem__)
        return most[limit], limit


# Multiprocessors, registers, warps, programs and shared memory of NVIDIA's: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability" (8.0, 9.0, 10.0), a warp's registers given out by 256; of gfx942: AMD's CDNA 3
# ISA guide (512 registers a lane, 64 KiB of LDS) and LLVM's AMDGPUBaseInfo (8 waves a SIMD, by 8 registers, 16
# barriers). Bandwidths: data sheets of the A100 80GB SXM (2.04 TB/s), H200 (4.8), HGX B200 (8) and MI300X (5.3).
# Latencies: unloaded ones are published between 300 and 800 ns; a busy memory answers later, an MI300X through a
# further cache and another die. These are guesses, the same for all of NVIDIA's.
DEVICES = {
    device.arch: device
    for device in (
        Device("sm_80", "A100 80GB", 108, 2.04, 700, 32, 4, 512, 8, 16, 32, 32, 164 * KIB, KIB),
        Device("sm_90", "H200", 132, 4.8, 700, 32, 4, 512, 8, 16, 32, 32, 228 * KIB, KIB),
        Device("sm_100", "B200", 148, 8.0, 700, 32, 4, 512, 8, 16, 32, 32, 228 * KIB, KIB),
        Device("gfx942", "MI300X", 304, 5.3, 900, 64, 4, 512, 8, 8, 16, 32, 64 * KIB, 0),
    )
}
