"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const LEFT = 46, RIGHT = 8, TOP = 12, BOTTOM = 20;

  // ---- pages: sections become tabs; a search in the page still finds what is on another one
  const links = [...document.querySelectorAll(".tabs a")];
  const pages = links.map((link) => document.querySelector(link.getAttribute("href")));
  const nav = document.querySelector(".tabs");
  nav.setAttribute("role", "tablist");
  document.body.classList.add("tabbed");
  const show = (page) => {
    pages.forEach((other, place) => {
      const chosen = other === page;
      if (chosen) other.removeAttribute("hidden"); else other.setAttribute("hidden", "until-found");
      links[place].setAttribute("aria-selected", String(chosen));
      links[place].tabIndex = chosen ? 0 : -1;
    });
  };
  const target = () => document.getElementById(location.hash.slice(1));
  const named = () => (target() && target().closest("section")) || pages[0];
  const arrive = () => {
    show(named());
    const chart = target();
    if (!chart || !chart.matches(".chart")) { window.scrollTo(0, 0); return; }
    if (chart.closest("details")) chart.closest("details").open = true;
    chart.scrollIntoView();
    chart.focus({ preventScroll: true });
  };
  links.forEach((link, place) => {
    link.id = "tab-" + pages[place].id;
    link.setAttribute("role", "tab");
    link.setAttribute("aria-controls", pages[place].id);
    pages[place].setAttribute("role", "tabpanel");
    pages[place].setAttribute("aria-labelledby", link.id);
    pages[place].addEventListener("beforematch", () => show(pages[place]));
    link.addEventListener("click", (event) => {
      event.preventDefault();
      history.pushState(null, "", "#" + pages[place].id);
      show(pages[place]);
      window.scrollTo(0, 0);
    });
    link.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const next = links[(place + move + links.length) % links.length];
      next.focus();
      next.click();
    });
  });
  window.addEventListener("popstate", arrive);
  show(named());
  window.addEventListener("load", arrive);

  // ---- readouts: every chart shows the same step
  const word = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size >= 1e6 || size < 1e-4 ? value.toExponential(3) : String(Number(value.toPrecision(4)));
  };
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
  };
  const charts = [...document.querySelectorAll(".chart")].map((figure) => {
    const readout = figure.querySelector(".readout");
    return { figure, readout, rest: readout.textContent, cursor: figure.querySelector(".cursor"), own: data[figure.dataset.id], place: 0 };
  }).filter((chart) => chart.own && chart.own.s.length);
  const visible = new Set();
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) visible.add(entry.target); else visible.delete(entry.target);
  }));
  charts.forEach((chart) => watcher.observe(chart.figure));
  const point = (chart, place) => {
    const [first, last, low, high, width, height] = chart.own.f;
    const step = chart.own.s[place], value = chart.own.v[place];
    const x = LEFT + (step - first) / Math.max(last - first, 1e-9) * (width - LEFT - RIGHT);
    const share = (Math.min(Math.max(value, low), high) - low) / Math.max(high - low, 1e-300);
    const y = height - BOTTOM - share * (height - TOP - BOTTOM);
    chart.place = place;
    chart.cursor.removeAttribute("hidden");
    const line = chart.cursor.querySelector("line"), circle = chart.cursor.querySelector("circle");
    line.setAttribute("x1", x); line.setAttribute("x2", x);
    circle.setAttribute("cx", x); circle.setAttribute("cy", y);
    chart.readout.textContent = "step " + step.toLocaleString("en") + "   " + word(value);
    chart.figure.classList.add("reading-now");
  };
  const clear = () => charts.forEach((chart) => {
    chart.cursor.setAttribute("hidden", "");
    chart.readout.textContent = chart.rest;
    chart.figure.classList.remove("reading-now");
  });
  const showStep = (step, also) => charts.forEach((chart) => {
    if (chart === also || visible.has(chart.figure)) point(chart, nearest(chart.own.s, step));
  });
  charts.forEach((chart) => {
    const svg = chart.figure.querySelector("svg");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), [first, last, , , width] = chart.own.f;
      const x = (event.clientX - box.left) / box.width * width;
      showStep(first + (x - LEFT) / (width - LEFT - RIGHT) * (last - first), chart);
    });
    svg.addEventListener("pointerleave", clear);
    chart.figure.addEventListener("blur", clear);
    chart.figure.addEventListener("keydown", (event) => {
      const end = chart.own.s.length - 1;
      const place = { ArrowRight: chart.place + 1, ArrowLeft: chart.place - 1, Home: 0, End: end }[event.key];
      if (event.key === "Escape") clear();
      if (place === undefined) return;
      event.preventDefault();
      showStep(chart.own.s[Math.min(Math.max(place, 0), end)], chart);
    });
  });

  // ---- finding a signal
  const filter = document.getElementById("filter");
  filter.addEventListener("input", () => {
    const asked = filter.value.trim().toLowerCase();
    document.querySelectorAll("#health [data-name]").forEach((one) => one.classList.toggle("away", !one.dataset.name.includes(asked)));
    document.querySelectorAll("#health .family").forEach((family) => {
      family.classList.toggle("away", !family.querySelector("[data-name]:not(.away)"));
      const more = family.querySelector(".more");
      if (more) more.open = Boolean(asked) && Boolean(more.querySelector("[data-name]:not(.away)"));
    });
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.matches("input")) return;
    const page = document.getElementById("health");
    if (page.hasAttribute("hidden")) { location.hash = "#health"; show(page); }
    event.preventDefault();
    filter.focus();
  });
})();
