"""The benchmark's command line, on a model of a fraction of a megabyte."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.tiny_model import make_tiny_llama


def test_decode_hf_ends_with_one_json_line_and_keeps_its_samples(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    command = [sys.executable, "-m", "bench", "decode_hf", "--model", str(model)]
    command += ["--batch", "1", "3", "--rounds", "2", "--new-tokens", "6", "--prompt-tokens", "9"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ratio_vs_hf"].keys() == {"1", "3"}
    assert result["equal_tokens"] == {"1": 1.0, "3": 1.0}
    record = json.loads((tmp_path / "out" / "decode_hf.json").read_text())
    assert [sample["arm"] for sample in record["raw"]][:4] == ["hf@1", "epd@1", "epd@1", "hf@1"]
    assert len(record["raw"]) == 2 * 2 * 4
    assert str(tmp_path) not in json.dumps(record)
