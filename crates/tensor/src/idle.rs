//! Lanes of devices that compute beside the program: what was recorded and has waited for [`OLD`] while its device has
//! nothing to do is submitted, so that the device works while the program does something else. A thread looks at lanes
//! where something waits, and sleeps while there are none. Devices that compute when somebody waits have no such lanes.

use crate::lane::Lane;
use std::sync::{Condvar, Mutex, Once};
use std::time::Duration;

/// How long something waits at least. Recording a step takes a fraction of this; a step that is sealed here is computed as
/// ever, but looks new to its device.
const OLD: Duration = Duration::from_millis(100);

/// Lanes where something waits, each with how far it was submitted when it was looked at last.
static WAITING: Mutex<Vec<(&'static Lane, u64)>> = Mutex::new(Vec::new());
static MORE: Condvar = Condvar::new();

/// Has a lane looked at until nothing waits in it.
#[cold]
pub(crate) fn watch(lane: &'static Lane, submitted: u64) {
    static THREAD: Once = Once::new();
    // Without the thread, lanes are sealed where they otherwise are.
    THREAD.call_once(|| drop(std::thread::Builder::new().name("kiln-idle".into()).spawn(look)));
    WAITING.lock().unwrap_or_else(|e| e.into_inner()).push((lane, submitted));
    MORE.notify_one();
}

fn look() {
    loop {
        let none = |waiting: &mut Vec<_>| waiting.is_empty();
        let waiting = WAITING.lock().unwrap_or_else(|e| e.into_inner());
        drop(MORE.wait_while(waiting, none).unwrap_or_else(|e| e.into_inner()));
        std::thread::sleep(OLD);
        // A lane is locked without this list's lock: who records adds to the list under a lane's.
        let mut lanes = std::mem::take(&mut *WAITING.lock().unwrap_or_else(|e| e.into_inner()));
        lanes.retain_mut(|(lane, seen)| match lane.seal_if_idle(*seen) {
            Some(submitted) => {
                *seen = submitted;
                true
            }
            None => false,
        });
        WAITING.lock().unwrap_or_else(|e| e.into_inner()).append(&mut lanes);
    }
}
