// The page, from top to bottom.
"use strict";

header();
differences();
hints();
allCurves();
staleness();
selection();
timeUse();
events();
samples();
settings();
footer();
document.body.append(label);
redraw();
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
