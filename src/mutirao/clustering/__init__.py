"""Client groups: find who is alike, train one model a group, let newcomers in, combine what groups have learnt."""

from mutirao.clustering.ensemble import combine
from mutirao.clustering.formation import form, quality
from mutirao.clustering.late_joiners import Admission, admit
from mutirao.clustering.membership import Groups

__all__ = ["Admission", "Groups", "admit", "combine", "form", "quality"]
