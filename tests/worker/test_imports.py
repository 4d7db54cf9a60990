"""What the engine imports of mlx-lm, and what it leaves out."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_server.models.vision import can_see
from mlx_server.worker.mlx_lm_internals import check_mlx_lm


def test_this_version_has_all_of_it() -> None:
    check_mlx_lm()


IN_A_NEW_PROCESS = """
import sys
from importlib.util import find_spec
from mlx_server.worker.unused_imports import UNUSED, left_out

with left_out():
    from mlx_server.worker.engine import Engine
    from mlx_lm.tokenizer_utils import NewlineTokenizer
assert NewlineTokenizer.__name__ == "NewlineTokenizer"
assert sys.modules.keys().isdisjoint(UNUSED), "a placeholder stays"
assert not any(name.startswith("torch") for name in sys.modules)
assert all(find_spec(name).origin for name in UNUSED), "the real one can be imported later"
"""


def test_the_engine_starts_without_what_it_never_calls() -> None:
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], check=True)


@pytest.mark.slow
def test_a_process_that_has_the_real_package_keeps_it() -> None:
    code = """
import huggingface_hub
from mlx_server.worker.unused_imports import left_out

with left_out():
    from huggingface_hub import snapshot_download
assert snapshot_download.__module__.startswith("huggingface_hub.")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


REFUSED = (
    "torch",
    "torchvision",
    "datasets",
    "cv2",
    "mlx_audio",
    "scipy",
    "pandas",
    "transformers",
)

SEES = f"""
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

class Refusing(MetaPathFinder):
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {REFUSED}:
            raise ImportError(name + " is refused")

from mlx_server.worker.unused_imports import left_out

with left_out():
    from mlx_server.worker.engine import Engine
sys.meta_path.insert(0, Refusing())

import mlx.core as mx
from mlx_server.engine.messages import Picture
from mlx_server.models.vision import Borrowed
from mlx_server.system.sandbox.files import decoded, processed
from mlx_server.worker import weights
from mlx_server.worker.sight import sight_of
from mlx_server.worker.vision_towers import tower_features
from tests.drained import drained
from tests.sandbox.test_pictures import halves, saved
from tests.tiny_vision import VISION_FAMILIES, WHOLE_FAMILIES, tiny_vision

whole = WHOLE_FAMILIES.keys() - {{"llava_onevision"}}  # which calls a function of transformers
for family in (*VISION_FAMILIES, *whole):
    model, _ = drained(weights.load(tiny_vision(Path(sys.argv[1], family), family), sees=True))
    sight = sight_of(model)
    sizes, pixels = decoded(saved(halves(), "PNG"), sight.vision.shown(), sight.vision.filter)
    layout, recipe = [], sight.vision.recipe
    if isinstance(recipe, Borrowed):
        made, pixels = processed(recipe.folder, recipe.stamp, sizes[0], pixels)
        layout = [len(made.ids)]
    picture = Picture(0, b"", 0, sizes, pixels)
    features = tower_features(sight.tower, picture, sight.vision)
    layout = layout or sight.vision.layout(sizes)
    assert len(features[0]) == sum(part for part in layout if isinstance(part, int)), family
    mx.eval(features)
assert sys.modules.keys().isdisjoint({REFUSED})
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_see(), reason="the extra `vision` is not installed")
def test_towers_need_none_of_what_mlx_vlm_names_as_its_dependencies(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SEES, str(tmp_path)], check=True)
