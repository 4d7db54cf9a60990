// The view Now: what the server does at this moment.

export function mount(section) {
  section.className = "now";
}
