"""Lock file, Makefile and hooks as a fresh machine meets them."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^[a-z0-9._-]+==[0-9][0-9a-z.]*$")


def test_the_lock_file_holds_exact_public_versions_and_nothing_else():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 40
    for line in pins:
        assert PIN.match(line), line
    assert "torch==2.13.0" in pins


def test_everything_that_is_asked_for_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(item for extra in extras for item in extra)]
    locked = {
        line.split("==")[0].replace("_", "-").lower()
        for line in (ROOT / "requirements.lock").read_text().splitlines()
    }
    for requirement in asked:
        name = re.split(r"[^A-Za-z0-9._-]", requirement)[0].replace("_", "-").lower()
        assert name in locked, f"{name}: run make lock"


def test_an_old_python_is_one_clear_line(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit 0\nexit 1\n')
    old.chmod(0o755)
    for file in ("Makefile", "requirements.lock", "pyproject.toml", "hatch_build.py"):
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    # Run by make itself, the tests inherit flags that print directories.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    made = subprocess.run(
        ["make", "demo", f"PYTHON={old}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode != 0
    assert made.stdout.strip() == (
        f"epd needs Python 3.11 or newer; {old} is Python 3.9.1; name another with PYTHON=..."
    )


def test_pre_commit_uses_local_hooks_only():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
