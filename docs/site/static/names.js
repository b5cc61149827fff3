// The theme's buttons that show the pages below a page have no name for screen readers: name them after that page.
document.addEventListener("DOMContentLoaded", () => {
  for (const summary of document.querySelectorAll("li > details > summary")) {
    const link = summary.closest("li").querySelector(":scope > a");
    if (link !== null && summary.textContent.trim() === "") summary.setAttribute("aria-label", `Pages below ${link.textContent.trim()}`);
  }
});
