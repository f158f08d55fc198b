// What scrolls sideways can be reached with the keyboard, and the search box has a name.
const reachable = () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code, .output")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0
    else box.removeAttribute("tabindex")
  }
}
addEventListener("load", reachable)
addEventListener("resize", reachable)
