"""Identity on the trained model that ships with the project, whose outputs are confident text."""

from pathlib import Path

import pytest

from epd.engine.build import build_vision_runner
from epd.engine.families.registry import load_family
from tests.engine.harness import ImagePrompts, Reference, running

SHAPES_VL = Path(__file__).parents[2] / "models" / "shapes-vl"


@pytest.mark.parametrize("native", [False, True])
def test_zero_to_four_images_and_long_prompts_run_together(native: bool) -> None:
    prompts = ImagePrompts(load_family(SHAPES_VL), build_vision_runner(SHAPES_VL))
    reference = Reference(SHAPES_VL, vision=True)
    pairs = [
        prompts.request(
            f"r{count}-{text}",
            [(84 + 28 * i, 200 - 20 * i) for i in range(count)],
            text,
            seed=10 * count + text,
            max_tokens=32,
        )
        for count in range(5)
        for text in (3, 30, 250)
    ]
    expected = [reference.generate(inputs, 32) for _, inputs in pairs]
    with running(SHAPES_VL, native=native) as client:
        assert client.run(made for made, _ in pairs) == expected
        client.assert_idle()
