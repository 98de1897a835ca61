"""Files and trees from here to there and back: in order, in constant memory, compared on arrival.

A file is first a part beside its place (`part_name` in landing.py) and gets its name when it is whole;
uploads of up to PART_BYTES excepted, which are one message. A part that an earlier transfer of the same
file left is taken up if the bytes in it are still the right ones. The digest of the far side is computed
there, by a command; where none can be run, what arrived is read back. Nothing is fsynced here, and
permissions and times are not brought along: what arrives has those of the file it replaces, or of a new one.

Links to files are followed, on both sides. What is neither file nor directory is written in place if it is
a target. Links to directories, and what is neither file nor directory, are left out of trees and reported.
"""

from __future__ import annotations

from .download import Download
from .transfer import LEADS_NOWHERE, LEFT_OUT
from .upload import PART_BYTES, Upload

__all__ = ["LEADS_NOWHERE", "LEFT_OUT", "PART_BYTES", "Download", "Upload"]
