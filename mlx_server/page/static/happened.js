// The view What happened: the latest requests, and charts of the last hours.

export function mount(section) {
  section.className = "happened";
}
