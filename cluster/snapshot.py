"""A copy of the code and the resolved settings in the model folder, which a job and its restarts run.

MODEL_FOLDER/snapshots/DIGEST/code and settings.yaml. Editing the sources or the configuration does not change a job
that is queued or will be requeued. The digest is that of the content: the same code and settings are one snapshot.
"""

import hashlib
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from common import run_card
from common.config import settings_text
from common.files import write_text
from common.settings import Settings

PACKAGES = ("common", "corpus", "training", "cluster", "workflow")
"""What a training job imports."""
_ROOT = Path(__file__).resolve().parents[1]


def make_snapshot(settings: Settings, folder: Path) -> Path:
    """Copy the code and the settings into a model folder; returns the snapshot's folder, which is complete."""
    text = settings_text(settings)
    files = [path for package in PACKAGES for path in sorted((_ROOT / package).rglob("*")) if _is_source(path)]
    digest = hashlib.sha256(text.encode())
    for path in files:
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    snapshot = folder / "snapshots" / digest.hexdigest()[:12]
    if not snapshot.is_dir():
        building = snapshot.with_name(f"{snapshot.name}.tmp")  # one submitter at a time
        shutil.rmtree(building, ignore_errors=True)
        for path in files:
            copy = building / "code" / path.relative_to(_ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        write_text(building / "settings.yaml", text)
        write_text(building / "code" / run_card.COMMIT, run_card.commit(_ROOT) or "")
        building.rename(snapshot)
    return snapshot


def remove_snapshots(folder: Path, keep: Collection[Path]) -> None:
    """Remove the snapshots of a model folder, finished or not, except those in `keep`."""
    kept = {path.name for path in keep}
    for path in (folder / "snapshots").iterdir():
        if re.fullmatch(r"[0-9a-f]{12}(\.tmp)?", path.name) and path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)  # a network file system may hold a file open


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts
