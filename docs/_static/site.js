// The side bar shows where the reader is, in a list that is longer than the screen.
document.addEventListener("DOMContentLoaded", () => {
  const bar = document.querySelector(".sidebar-scroll");
  const here = document.querySelector(".sidebar-tree .current-page");
  if (bar && here) {
    const place = here.getBoundingClientRect().top - bar.getBoundingClientRect().top;
    bar.scrollBy({ top: place - bar.clientHeight / 3, behavior: "instant" });
  }
});
