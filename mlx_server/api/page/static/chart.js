// A line over time. Samples that are not next to each other are not joined.

import { html, useState } from "./vendor/htm-preact-3.1.1.js";
import { clock } from "./words.js";

const WIDTH = 1000, HEIGHT = 100;

/**
 * points: [time, value] in order; from, to: the times at the edges; gap: the longest time between
 * two points that are joined; words: a value as text; floor: the least top of the scale.
 */
export function Chart({ title, points, from, to, gap, words, floor = 0, limit = null }) {
  const [chosen, setChosen] = useState(null);
  const most = Math.max(floor, ...points.map(([, value]) => value), 0) * 1.08 || 1;
  const x = (time) => ((time - from) / (to - from)) * WIDTH;
  const y = (value) => HEIGHT - (value / most) * HEIGHT;
  const point = points[chosen] ?? points.at(-1);
  const nearest = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const time = from + ((event.clientX - box.left) / box.width) * (to - from);
    setChosen(closest(points, time));
  };
  const keys = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !points.length) return;
    event.preventDefault();
    const at = (chosen ?? points.length - 1) + step;
    setChosen(Math.min(Math.max(at, 0), points.length - 1));
  };
  const shown = point ? `${words(point[1])} at ${clock(point[0], true)}` : "nothing yet";
  return html`
    <figure class="panel chart">
      <figcaption><h3>${title}</h3><span class="dim">${shown}</span></figcaption>
      <div class="plot" tabindex="0" role="slider" aria-label=${title}
        aria-valuetext=${shown} aria-valuenow=${chosen ?? points.length - 1} aria-valuemin="0"
        aria-valuemax=${Math.max(0, points.length - 1)}
        onPointerMove=${nearest} onPointerLeave=${() => setChosen(null)} onKeyDown=${keys}
        onBlur=${() => setChosen(null)}>
        <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
          <path class="grid" d=${`M0 ${HEIGHT / 2}H${WIDTH}`} />
          ${limit !== null && limit <= most && html`
            <path class="limit" d=${`M0 ${y(limit)}H${WIDTH}`} />`}
          <path class="series" d=${line(points, x, y, gap)} />
          ${chosen !== null && point && html`
            <path class="cursor" d=${`M${x(point[0])} 0V${HEIGHT}`} />`}
        </svg>
        <span class="top dim">${points.length > 0 && words(most / 1.08)}</span>
      </div>
      <div class="line edges dim"><span>${clock(from)}</span><span>${clock(to)}</span></div>
    </figure>`;
}

function line(points, x, y, gap) {
  let path = "", before = -Infinity;
  for (const [time, value] of points) {
    const at = `${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    path += path && time - before <= gap ? `L${at}` : `M${at}h.01`; // a point of its own is a dot
    before = time;
  }
  return path;
}

function closest(points, time) {
  let best = null;
  points.forEach(([at], place) => {
    if (best === null || Math.abs(at - time) < Math.abs(points[best][0] - time)) best = place;
  });
  return best;
}
