"""The modelling file of a saved folder, which transformers loads with trust_remote_code=True."""

import json
from functools import cache
from pathlib import Path

from trisect.bundle.merge import merged
from trisect.bundle.sources import sources_for
from trisect.errors import TrisectError
from trisect.files import atomic_write_text, write_json

MODULE = "modeling_trisect"
ROOT = "trisect.models.compressed"

HEADER = '''\
# Copyright the trisect authors. Licensed under the Apache License, Version 2.0 (the "License"); you may not
# use this file except in compliance with the License. You may obtain a copy at
#     http://www.apache.org/licenses/LICENSE-2.0
# Unless required by applicable law or agreed to in writing, software distributed under the License is
# distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and limitations under the License.
#
# Made from the sources of trisect: edit those, not this file.
"""A model compressed with trisect, for transformers without trisect."""

'''

FOOTER = """

# The classes of this folder


def has_triton() -> bool:
    return False  # the Triton kernels stay with trisect; their plain twins are above
"""


@cache
def _shared_text() -> str:
    sources, left_out = sources_for(ROOT)
    return HEADER + merged(sources, without=left_out) + FOOTER


def bundle_text(family: str, model_class: str, config_class: str, record: str | None = None) -> str:
    """The whole file: the modules that build compressed models, and the two classes of one family.

    A family from outside the package comes with its `record`, as Python writes it.
    """
    added = "" if record is None else f'\n\nFAMILIES["{family}"] = {record}\n'
    return (
        _shared_text()
        + added
        + f'\n\n{model_class} = compressed_class("{family}")\n'
        + f"{config_class} = {model_class}.config_class\n"
    )


def write_bundle(
    folder: Path, *, family: str, model_class: str, config_class: str, record: str | None = None
) -> None:
    """Put the modelling file into a saved folder, and say in its config.json what is in it."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("architectures") != [model_class]:
        raise TrisectError(f"{path} is of {config.get('architectures')}, not of {model_class}.")
    config["auto_map"] = {
        "AutoConfig": f"{MODULE}.{config_class}",
        "AutoModelForCausalLM": f"{MODULE}.{model_class}",
    }
    atomic_write_text(folder / f"{MODULE}.py", bundle_text(family, model_class, config_class, record))
    write_json(path, config)
