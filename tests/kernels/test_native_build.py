"""The C library as any engine would take it: built for every architecture, exporting kdtree.h, linked from plain C."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree.kernels import build

PROGRAM = Path(__file__).parent / "c_program" / "main.c"
HEADER = build.SOURCES / "include" / "kdtree.h"
PTX, MACHINE_CODE = 1, 2
FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)


@pytest.fixture(scope="module")
def library() -> Path:
    if build.find_nvcc() is None:
        pytest.skip("there is no nvcc on this machine")
    return build.build()


def device_code(library: Path) -> Iterator[set[tuple[int, int]]]:
    """(kind, architecture) of what each source file has in the library, from the headers nvcc puts before device code.

    Read here because cuobjdump is not always installed with nvcc.
    """
    data = library.read_bytes()
    for match in re.finditer(re.escape(FATBIN_MAGIC), data):
        header_bytes, body_bytes = struct.unpack_from("<HQ", data, match.start() + 6)
        at = match.start() + header_bytes
        end, found = at + body_bytes, set()
        while at < end:
            kind, entry_header_bytes, entry_bytes = struct.unpack_from("<H2xIQ", data, at)
            (architecture,) = struct.unpack_from("<I", data, at + 28)
            found.add((kind, architecture))
            at += entry_header_bytes + entry_bytes
        yield found


def test_holds_code_for_every_architecture(library):
    files = list(device_code(library))
    everywhere = {(PTX, 80), (MACHINE_CODE, 90), (MACHINE_CODE, 100), (MACHINE_CODE, 120)}
    assert set().union(*files) == everywhere
    with_kernels = [path for path in build.SOURCES.glob("*.cu") if "__global__" in path.read_text()]
    with_kernels = [path for path in with_kernels if "hopper" not in path.name]  # that one is for sm_90a alone
    assert sum(found == everywhere for found in files) >= len(with_kernels)


def test_exports_the_header_and_nothing_else(library):
    declared = re.findall(r"^KDTREE_API .*?\b(kdtree_\w+)\(", HEADER.read_text(), re.MULTILINE)
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    assert sorted(line.split()[-1] for line in symbols.splitlines()) == sorted(declared)


def toolkit_folders(variable: str) -> list[str]:
    """Where nvcc itself finds headers (INCLUDES) or libraries (LIBRARIES): it may be a script far from its toolkit."""
    shown = subprocess.run([build.find_nvcc(), "--dryrun", "-c", PROGRAM], capture_output=True, text=True, check=True)
    line = re.search(rf"^#\$ {variable}=.*$", shown.stderr, re.MULTILINE)
    return re.findall(r'"-[IL](.*?)"', line[0])


def test_a_c_program_compiles_links_and_runs(library, tmp_path):
    program = tmp_path / "program"
    compiler = shutil.which("cc") or "gcc"
    command = [
        *(compiler, "-std=c11", "-Wall", "-Werror", "-pedantic"),
        *("-I", HEADER.parent, *(f"-isystem{path}" for path in toolkit_folders("INCLUDES")), PROGRAM, "-o", program),
        *(f"-L{library.parent}", "-lkdtree_kernels_c", f"-Wl,-rpath,{library.parent}"),
        *(f"-L{path}" for path in toolkit_folders("LIBRARIES")),
        *("-lcudart_static", "-lpthread", "-ldl", "-lrt"),
    ]
    subprocess.run(command, check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout.startswith("ok")
