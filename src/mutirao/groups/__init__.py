"""Client groups: find who is alike, train one model a group, let newcomers in, combine what groups have learnt."""

from mutirao.groups.admit import Admission, admit
from mutirao.groups.combine import combine
from mutirao.groups.form import form, quality
from mutirao.groups.membership import Groups

__all__ = ["Admission", "Groups", "admit", "combine", "form", "quality"]
