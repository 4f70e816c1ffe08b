"""Generates the gRPC stubs into epd/v1 when a wheel, an sdist or an editable install is built."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def generate_stubs(root: Path) -> None:
    """Runs protoc over ``protos``; the import root equals the proto root, so nothing is patched.

    Raises:
        RuntimeError: protoc refused a file.
    """
    import grpc_tools
    from grpc_tools import protoc

    protos = sorted(str(p.relative_to(root / "protos")) for p in (root / "protos").rglob("*.proto"))
    well_known = str(Path(grpc_tools.__file__).parent / "_proto")
    arguments = [
        "protoc",
        f"-I{root / 'protos'}",
        f"-I{well_known}",
        f"--python_out={root}",
        f"--pyi_out={root}",
        f"--grpc_python_out={root}",
        *protos,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")
    (root / "epd" / "v1" / "__init__.py").touch()


class StubsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling's entry to :func:`generate_stubs`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate_stubs(Path(self.root))
