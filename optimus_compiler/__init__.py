"""optimus_compiler: a plain model is a program; parallelism and speed are passes over it."""

from optimus_compiler import models
from optimus_compiler.capture import CaptureError, capture
from optimus_compiler.check import CheckError
from optimus_compiler.compile import compile
from optimus_compiler.compiled import CompiledModel, ModelOutput, StepOutput
from optimus_compiler.experts import register_experts
from optimus_compiler.explain import explain
from optimus_compiler.lower import lower
from optimus_compiler.mesh import Mesh
from optimus_compiler.passes import Pass, PassError, PassPipeline, PassReport, default_passes
from optimus_compiler.program import ParameterSpec, Program, ProgramError, Segment, Source
from optimus_compiler.runtime.optimizer import ShardedAdamW

__all__ = [
    "CaptureError",
    "CheckError",
    "CompiledModel",
    "Mesh",
    "ModelOutput",
    "ParameterSpec",
    "Pass",
    "PassError",
    "PassPipeline",
    "PassReport",
    "Program",
    "ProgramError",
    "Segment",
    "ShardedAdamW",
    "Source",
    "StepOutput",
    "capture",
    "compile",
    "default_passes",
    "explain",
    "lower",
    "models",
    "register_experts",
]
