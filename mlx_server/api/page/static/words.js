// Numbers and times in words.

const UNITS = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];

export function bytes(count) {
  const [size, unit] = UNITS.find(([least]) => count >= least) ?? [1, "bytes"];
  const amount = count / size;
  return `${amount.toFixed(size > 1e6 && amount < 100 ? 1 : 0)} ${unit}`;
}

export function number(count) {
  return count.toLocaleString("en");
}

export function several(count, one, more = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : more}`;
}

export function seconds(time) {
  if (time < 1) return `${Math.round(time * 1000)} ms`;
  if (time < 60) return `${time.toFixed(1)} s`;
  return duration(time);
}

export function duration(time) {
  const minutes = Math.round(time / 60);
  if (minutes < 1) return `${Math.round(time)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : several(Math.floor(hours / 24), "day");
}

export function clock(unix, withSeconds = false) {
  const parts = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (withSeconds) parts.second = "2-digit";
  return new Date(unix * 1000).toLocaleTimeString("en", parts);
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}
