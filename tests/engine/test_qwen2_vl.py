"""The family's arithmetic equals transformers', and each half loads without the other."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLForConditionalGeneration

from epd.engine.families.base import ModelFamily
from epd.engine.families.registry import load_family
from epd.engine.model_digest import model_digest
from epd.engine.requests import PromptImage
from epd.engine.vision_runner import VisionRunner
from epd.errors import InvalidRequestError, UnsupportedFeatureError

CPU = torch.device("cpu")
SIZES = [(56, 56), (100, 150), (300, 80), (30, 200)]


@pytest.fixture(scope="module")
def family(tiny_qwen2vl: Path) -> ModelFamily:
    return load_family(tiny_qwen2vl)


@pytest.fixture(scope="module")
def reference(tiny_qwen2vl: Path) -> Qwen2VLForConditionalGeneration:
    return Qwen2VLForConditionalGeneration.from_pretrained(tiny_qwen2vl).eval()


def layout(
    family: ModelFamily, parts: list[int | tuple[int, int]]
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Tokens and images of a prompt; a part is a text length or a patch grid's height and width."""
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            tokens += [65] * part
        else:
            plan = family.plan_image((1, *part))
            images.append(PromptImage(len(tokens), plan.embedding_tokens, b"", plan.grid))
            tokens += plan.placeholder_ids
    return tokens, tuple(images)


@settings(deadline=None, max_examples=50)
@given(
    parts=st.lists(
        st.one_of(st.integers(1, 9), st.tuples(*[st.integers(1, 6).map(lambda n: 2 * n)] * 2)),
        min_size=1,
        max_size=6,
    ),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_positions_equal_get_rope_index(
    family: ModelFamily,
    reference: Qwen2VLForConditionalGeneration,
    parts: list[int | tuple[int, int]],
    cut: tuple[float, float],
) -> None:
    # transformers tells neighbouring images apart by text only, as real templates always have it
    parts = [p for part in parts for p in ((part,) if isinstance(part, int) else (1, part))]
    tokens, images = layout(family, parts)
    ids = torch.tensor([tokens])
    assert family.embedding_token_id is not None
    grids = torch.tensor([image.grid for image in images]) if images else None
    expected, delta = reference.model.get_rope_index(
        ids, ids.eq(family.embedding_token_id).int(), grids
    )
    total = sum(family.plan_image(i.grid).position_delta for i in images if i.grid)
    assert total == delta.item()
    start, end = sorted(int(c * len(tokens)) for c in cut)
    got = family.positions(tokens, images, total, start, end)
    np.testing.assert_array_equal(got, expected[:, 0, start:end].numpy())
    after = family.positions(tokens, (), total, len(tokens), len(tokens) + 3)
    np.testing.assert_array_equal(after[0], np.arange(3) + len(tokens) + delta.item())


@pytest.mark.parametrize("size", SIZES)
def test_the_plan_from_the_size_is_the_plan_of_the_pixels(
    family: ModelFamily, size: tuple[int, int]
) -> None:
    pixels = family.preprocess(Image.new("RGB", size, "red"))
    assert family.plan_from_size(*size) == family.plan_image(pixels.grid)
    assert pixels.patches.shape[0] == int(np.prod(pixels.grid))


def test_an_extreme_side_ratio_is_refused(family: ModelFamily) -> None:
    with pytest.raises(InvalidRequestError):
        family.plan_from_size(1, 201)


def test_images_of_different_sizes_encode_together_as_they_do_alone(
    family: ModelFamily, reference: Qwen2VLForConditionalGeneration
) -> None:
    generator = np.random.default_rng(0)
    images = [
        Image.fromarray(generator.integers(0, 255, (h, w, 3), dtype=np.uint8)) for w, h in SIZES
    ]
    pixels = [family.preprocess(image) for image in images]
    runner = VisionRunner(family, family.load_vision(torch.float32, CPU), CPU)
    for one, embedding in zip(pixels, runner.encode(pixels), strict=True):
        with torch.inference_mode():
            expected = reference.get_image_features(
                torch.from_numpy(one.patches), torch.tensor([one.grid])
            ).pooler_output[0]
        torch.testing.assert_close(embedding, expected, rtol=1e-4, atol=1e-5)


def test_each_half_holds_none_of_the_others_weights(
    family: ModelFamily, reference: Qwen2VLForConditionalGeneration
) -> None:
    language = family.load_language(torch.float32, CPU)
    vision = family.load_vision(torch.float32, CPU)
    whole = dict(reference.named_parameters())
    of_vision = sum(p.numel() for n, p in whole.items() if ".visual." in n)
    of_language = sum(p.numel() for n, p in whole.items() if ".visual." not in n)
    assert sum(p.numel() for p in vision.parameters()) == of_vision
    held = [*language.body.parameters(), *language.lm_head.parameters()]
    assert sum(p.numel() for p in held) == of_language
    assert not any(t.is_meta for m in (language.body, vision) for t in (*m.buffers(), *held))


def test_a_sharded_folder_loads_with_either_naming(tmp_path: Path, tiny_qwen2vl: Path) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(tiny_qwen2vl, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    long_names = {
        name.replace("visual.", "model.visual.")
        if name.startswith("visual.")
        else name.replace("model.", "model.language_model."): tensor
        for name, tensor in tensors.items()
    }
    names = sorted(long_names)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: long_names[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    family = load_family(folder)
    loaded = family.load_language(torch.float32, CPU).body.state_dict()
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, tensors["model." + name], rtol=0, atol=0)
    family.load_vision(torch.float32, CPU)
    del weight_map["model.visual.merger.mlp.0.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidRequestError, match=r"lacks 1 tensors, .*mlp\.0\.weight"):
        family.load_vision(torch.float32, CPU)


def test_the_digest_changes_with_a_single_byte_of_the_weights(
    tmp_path: Path, tiny_qwen2vl: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen2vl, folder)
    before = model_digest(folder)
    assert before == model_digest(tiny_qwen2vl)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte[0] ^ 1]))
    assert model_digest(folder) != before


def test_a_text_model_takes_no_images(tiny_llama: Path) -> None:
    family = load_family(tiny_llama)
    assert not family.accepts_images
    with pytest.raises(UnsupportedFeatureError):
        family.plan_from_size(10, 10)


def test_an_unknown_model_type_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedFeatureError, match="llama, qwen2_vl, qwen3_vl"):
        load_family(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"config\.json"):
        load_family(tmp_path / "missing")
