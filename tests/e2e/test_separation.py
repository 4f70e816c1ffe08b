"""Which process holds what: asked of the running processes."""

import json

import pytest
from safetensors import safe_open

pytestmark = pytest.mark.timeout(600)


def parameter_counts(model):
    """Parameters of the vision and of the language half, by the names in the file."""
    halves = {"vision": 0, "language": 0}
    with safe_open(model / "model.safetensors", framework="np") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            count = 1
            for length in file.get_slice(name).get_shape():
                count *= length
            halves[
                "vision" if ".visual." in name or name.startswith("visual.") else "language"
            ] += count
    return halves


def test_each_worker_holds_its_half_of_the_model_and_nothing_of_the_other(model, shared_fleets):
    fleet = shared_fleets.get(model)
    halves = parameter_counts(model)
    assert min(halves.values()) > 0
    held = {
        name: fleet.scrape(name).total("epd_model_parameter_count")
        for name in ("encoder-0", "prefill-0", "decode-0")
    }
    assert held == {
        "encoder-0": halves["vision"],
        "prefill-0": halves["language"],
        "decode-0": halves["language"],
    }


def test_the_router_has_loaded_no_torch_and_no_transfer_library(model, shared_fleets):
    fleet = shared_fleets.get(model)

    def libraries(name):
        files = fleet.loaded_modules(name)
        return {part for part in ("libtorch", "nixl", "libucp") for f in files if part in f}

    assert libraries("router") == set()
    assert libraries("prefill-0") >= {"libtorch", "nixl"}


def test_only_a_unified_worker_holds_both_halves(model, shared_fleets):
    fleet = shared_fleets.get(model, encoders=0, prefills=0, decodes=0, unified=1)
    halves = parameter_counts(model)
    held = fleet.scrape("unified-0").total("epd_model_parameter_count")
    assert held == sum(halves.values())
    assert not json.loads((model / "config.json").read_text()).get("tie_word_embeddings")
