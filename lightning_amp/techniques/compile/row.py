"""Define the entry of compile in the table of techniques: its specs, of blocks and of strata."""

from dataclasses import dataclass

from lightning_amp.techniques.technique import Installer, Technique, on_decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileStrata:
    """A stratum's key and likelihood run through torch.compile."""

    mode: str = "default"  # "default", or "reduce-overhead" for CUDA graphs


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileBlock:
    """A block of any module runs through torch.compile; blocks of the same structure share their graphs."""


ROW = Technique(
    title="compile strata or blocks",
    shrinks="kernels of a stratum or block, by torch.compile",
    specs=(CompileStrata, CompileBlock),
    installers={
        CompileStrata: Installer("lightning_amp.techniques.compile.strata:compile_strata", on_decoder=True),
        CompileBlock: Installer("lightning_amp.techniques.compile.blocks:compile_block", on_blocks=True),
    },
    targets=on_decoder(lambda _: CompileStrata()),
    choice=("kernels", "compiled"),
)
