// Before the first paint, so that a chosen theme does not flash the other one. Not a module: modules wait for the document.
try {
  const theme = localStorage.getItem("octavo.theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // the browser's own colours then
}
