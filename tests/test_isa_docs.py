"""docs/ISA.md, docs/walk.md and the README's text of a Program say what the code says."""

from __future__ import annotations

from pathlib import Path

from bench import walk
from tpuflow.isa import codec
from tpuflow.isa.document import PATH, document
from tpuflow.isa.instruction import CUSTOM_OPCODES
from tpuflow.isa.program import GRID_KINDS, Kernel


def test_the_written_document_is_up_to_date() -> None:
    assert PATH.read_text(encoding="utf-8") == document(), "run python -m tpuflow.isa.document"


def test_the_walk_from_flax_to_bytes_is_up_to_date() -> None:
    ours, written = (_without_jaxpr(text) for text in (walk.document(), walk.PATH.read_text(encoding="utf-8")))
    assert ours == written, "run python -m bench.walk"


def test_the_readmes_graph_and_instructions_are_those_of_its_example() -> None:
    written = walk.README.read_text(encoding="utf-8")
    assert walk.readme(written) == written, "run python -m bench.walk"


def _without_jaxpr(text: str) -> list[str]:
    """The sections but the one that JAX writes, in other words from version to version."""
    return [section for section in text.split("\n## ") if not section.startswith("The jaxpr")]


def test_every_module_that_declares_instructions_is_known_to_the_codec() -> None:
    modules = {path.stem for path in Path(codec.__file__).parent.glob("*.py") if "\n@instr(" in path.read_text(encoding="utf-8")}
    assert modules == {family.__name__.rpartition(".")[2] for family in codec.FAMILIES}


def test_no_instruction_of_ours_takes_a_number_that_is_left_to_others() -> None:
    assert not {cls.opcode for cls in codec.DECLARED} & set(CUSTOM_OPCODES)


def test_the_document_describes_every_instruction_with_queue_and_cost() -> None:
    sections = {section.partition("\n")[0]: section for section in document().split("\n#### ")[1:]}
    assert set(sections) == {f"{cls.opcode:#04x} `{cls.mnemonic}`" for cls in codec.DECLARED}
    for cls in codec.DECLARED:
        section = sections[f"{cls.opcode:#04x} `{cls.mnemonic}`"]
        assert all(f"- `{name}`: " in section for name in cls.kinds)
        assert "- queue: \n" not in section and "- cost: \n" not in section


def test_the_document_names_the_words_of_every_choice() -> None:
    text = document()
    assert all(f"`{word}`" in text for cls in codec.DECLARED for kind in cls.kinds.values() for word in kind.choices)
    assert Kernel.__name__ in text and GRID_KINDS[0] in text
