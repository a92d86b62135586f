"""Builds the compiled operators. Everything else about the package is in pyproject.toml.

RLK_BUILD chooses what is compiled and is never guessed from a visible GPU:
    auto  cpu operators, and CUDA or ROCm ones where the installed torch was built for them and their compiler is found
    cpu   cpu operators only;  cuda / rocm  those as well, an error without nvcc / hipcc;  skip  nothing
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
CHOICES = ("auto", "cpu", "cuda", "rocm", "skip")


def sources(*folders: str, suffixes: tuple[str, ...] = (".cpp",)) -> list[str]:
    return sorted(
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / "csrc" / folder).glob("*")
        if path.suffix in suffixes
    )


def extension_modules() -> tuple[list, dict]:
    choice = os.environ.get("RLK_BUILD", "auto")
    if choice not in CHOICES:
        raise SystemExit(f"RLK_BUILD={choice!r} must be one of {', '.join(CHOICES)}")
    if choice == "skip":
        return [], {}
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise SystemExit(
            "no C++ compiler: install g++ (Debian: apt-get install g++) or set CXX; RLK_BUILD=skip installs without "
            "compiled operators, and strict runs on the CPU then use the slow reference"
        )
    import torch
    from torch.utils import cpp_extension

    cuda = choice == "cuda" or (choice == "auto" and torch.version.cuda and cpp_extension.CUDA_HOME is not None)
    rocm = choice == "rocm" or (choice == "auto" and torch.version.hip and cpp_extension.ROCM_HOME is not None)
    if choice == "cuda" and cpp_extension.CUDA_HOME is None:
        raise SystemExit("RLK_BUILD=cuda needs nvcc: install the CUDA toolkit or set CUDA_HOME")
    if choice == "rocm" and cpp_extension.ROCM_HOME is None:
        raise SystemExit("RLK_BUILD=rocm needs hipcc: install ROCm or set ROCM_HOME")

    # -ffp-contract=off: the contract names every fma, the compiler may add none.
    flags = ["-O3", "-std=c++20", "-ffp-contract=off", "-fno-fast-math", "-mavx2", "-mfma", "-fvisibility=hidden"]
    macros = [("TORCH_TARGET_VERSION", "0x020b000000000000")]  # py_limited_api=True adds Py_LIMITED_API
    modules = [
        cpp_extension.CppExtension(
            "rl_kernel._C",
            ["csrc/bindings.cpp", *sources("cpu")],
            include_dirs=[str(ROOT / "csrc")],
            define_macros=macros,
            extra_compile_args={"cxx": flags},
            py_limited_api=True,
        )
    ]
    if cuda or rocm:
        gpu = sources("gpu", suffixes=(".cu", ".cpp"))
        gpu += sources("sm90", suffixes=(".cu", ".cpp")) if cuda else []
        nvcc = ["-O3", "-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr"]
        if gpu:
            modules.append(
                cpp_extension.CUDAExtension(
                    "rl_kernel._C_gpu",
                    gpu,
                    include_dirs=[str(ROOT / "csrc")],
                    define_macros=[*macros, ("USE_CUDA" if cuda else "USE_ROCM", None)],  # stream functions of torch
                    extra_compile_args={"cxx": flags, "nvcc": nvcc if cuda else ["-O3", "--offload-arch=gfx942"]},
                    py_limited_api=True,
                )
            )
    return modules, {"build_ext": cpp_extension.BuildExtension}


modules, commands = extension_modules()
setup(ext_modules=modules, cmdclass=commands, options={"bdist_wheel": {"py_limited_api": "cp311"}} if modules else {})
