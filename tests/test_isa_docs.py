"""docs/ISA.md says what the code says."""

from __future__ import annotations

from tpuflow.isa.codec import FAMILIES
from tpuflow.isa.document import PATH, document
from tpuflow.isa.instruction import INSTRUCTIONS, Instruction
from tpuflow.isa.program import GRID_KINDS, Kernel


def test_the_written_document_is_up_to_date() -> None:
    assert PATH.read_text(encoding="utf-8") == document(), "run python -m tpuflow.isa.document"


def _declared() -> list[type[Instruction]]:
    """Every instruction, family by family, by opcode: in the document's order."""
    families = [family.__name__ for family in FAMILIES]
    return sorted(INSTRUCTIONS.values(), key=lambda cls: (families.index(cls.__module__), cls.opcode))


def test_the_document_describes_every_instruction_with_queue_and_cost() -> None:
    sections = document().split("\n#### ")[1:]
    assert len(sections) == len(INSTRUCTIONS)
    for cls, section in zip(_declared(), sections, strict=True):
        assert section.startswith(f"{cls.opcode:#04x} `{cls.mnemonic}`")
        assert all(f"- `{name}`: " in section for name in cls.kinds)
        assert "- queue: \n" not in section and "- cost: \n" not in section


def test_the_document_names_the_words_of_every_choice() -> None:
    text = document()
    assert all(f"`{word}`" in text for cls in INSTRUCTIONS.values() for kind in cls.kinds.values() for word in kind.choices)
    assert Kernel.__name__ in text and GRID_KINDS[0] in text
